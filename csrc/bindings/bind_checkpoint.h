// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "csrc/format/manifest.h"

namespace bytecheckpoint::bindings {

/// A manifest as Python holds it. Each extension module has its own Python class of it.
struct Checkpoint {
  format::Manifest manifest;

  /// The stored chunk of `fqn` that begins at `offsets`; raises KeyMismatchError if there is none.
  /// \param hint  Position to look at first, or -1.
  const format::Chunk& find_chunk(const std::string& fqn, const tensor::Dims& offsets, int64_t hint) const;
};

void bind_checkpoint(pybind11::module_& m);

}  // namespace bytecheckpoint::bindings
