// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::testing {

/// Binds checksums, records, archives, trees and load plans, as functions of bytes and numbers.
void bind_format(pybind11::module_& m);
/// Binds the inventories of ranks, and the plan of a save that is made from them.
void bind_inventories(pybind11::module_& m);
/// Binds a reader of pickles that makes Python values of them.
void bind_pickles(pybind11::module_& m);
/// Binds the metadata of made-up checkpoints of many ranks.
void bind_synthetic_metadata(pybind11::module_& m);
/// Binds what a kernel does to memory, done on the host.
void bind_tiles(pybind11::module_& m);

}  // namespace bytecheckpoint::testing
