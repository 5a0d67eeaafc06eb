// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "csrc/base/status.h"
#include "csrc/format/pickle/pickle_reader.h"
#include "csrc/format/pickle/standard_globals.h"
#include "csrc/format/torch/torch_archive.h"

namespace bytecheckpoint::format {

/// Returns the rules to read pickles with that `check_standard` checks.
PickleRules standard_rules();

/// Checks that a pickle, read with `standard_rules`, is made of builtin and standard types alone, each pickled as
/// Python, numpy and torch pickle it. Its values are a tree or a graph. References are kept, so that the values take no
/// more memory than Python's own unpickler would take.
///
/// \param tensors  Receives the plain tensors and Parameters among the values, by their cell. If null, tensors are
/// refused. They are also refused if all other values are builtin, because torch's own rules accept such a pickle.
/// \returns kUnsupported for everything else: values nested deeper than kMaxTreeDepth, or keys that share so much that
/// hashing them takes more steps than 32 times the bytes and 64 Ki. Constructors may still refuse a value that passes,
/// such as a date with month 13.
/// Takes two bits of memory for each cell of the pickle.
base::Status check_standard(const Pickle& pickle, std::unordered_map<uint32_t, PickledTensor>* tensors = nullptr);

/// A tensor among values of standard types, and where the archive has its elements.
struct StandardTensor {
  PickledTensor pickled;
  ArchivedTensor archived;
};

/// The content of an archive of torch.save that holds only standard types and plain tensors. Refers to the archive,
/// which must outlive it.
struct StandardArchive {
  Pickle pickle;
  std::unordered_map<uint32_t, StandardTensor> tensors;  // by the cell number of their value
};

/// Reads the values of an archive of torch.save, if `check_standard` accepts them.
///
/// \returns nullopt for everything else, which the caller leaves to torch.load; kCorrupt for an archive that is
/// damaged, or a storage of a tensor that fails its CRC.
base::Result<std::optional<StandardArchive>> read_standard_archive(std::string_view archive);

}  // namespace bytecheckpoint::format
