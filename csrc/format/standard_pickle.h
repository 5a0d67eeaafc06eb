// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string_view>

#include "csrc/base/status.h"
#include "csrc/format/pickle_reader.h"
#include "csrc/format/standard_globals.h"

namespace bytecheckpoint::format {

/// To read what `check_standard` checks.
PickleRules standard_rules();

/// Whether a pickle that was read by `standard_rules` is made of builtin and standard types alone, each pickled as
/// Python, numpy and torch do. What it says is a tree or a graph of them: references are kept, so that what is made of
/// it takes no more memory than what Python's own unpickler makes.
///
/// \returns kUnsupported for anything else, more than kMaxTreeDepth deep, or keys that share so much that hashing them
///   would take more steps than 32 times the bytes and 64 Ki. Objects may still be refused by their constructor: a date
///   of month
///   13. Takes two bits for each cell of the pickle.
base::Status check_standard(const Pickle& pickle);

/// The pickle of an archive of torch.save if `check_standard` lets it in. It refers to `archive`.
///
/// \returns nullopt for anything else, which torch.load may know how to read; kCorrupt for an archive that is damaged.
base::Result<std::optional<Pickle>> read_standard_archive(std::string_view archive);

}  // namespace bytecheckpoint::format
