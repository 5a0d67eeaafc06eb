// SPDX-License-Identifier: Apache-2.0
#include "csrc/testing/bindings.h"

PYBIND11_MODULE(_testing, m) {
  m.doc() = "What tests and benchmarks alone call; installs do not contain it, and it needs no torch.";
  bytecheckpoint::testing::bind_format(m);
  bytecheckpoint::testing::bind_inventories(m);
  bytecheckpoint::testing::bind_pickles(m);
  bytecheckpoint::testing::bind_synthetic_metadata(m);
  bytecheckpoint::testing::bind_tiles(m);
}
