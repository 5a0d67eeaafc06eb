// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

#include "csrc/base/status.h"
#include "csrc/format/pickle_values.h"

namespace bytecheckpoint::format {

/// What a reader of pickles lets in.
struct PickleRules {
  /// The caller's number for a global that may be named, nullopt for one that may not.
  std::function<std::optional<uint32_t>(std::string_view module, std::string_view name)> global;
  bool persistent_ids = false;
  /// Also sets, frozensets, bytearrays, ints of up to 255 bytes, and objects that are filled as lists or dicts are.
  bool standard_types = false;
};

/// Interprets the opcodes of a pickle as descriptions of values. Nothing is imported, called or instantiated.
///
/// Knows what the picklers of DCP and torch.save emit, protocols 2 to 5, and nothing that only other pickles need.
/// \param bytes  Must outlive what is made of them.
/// \returns kUnsupported for an opcode outside that, a global that the rules do not let in, or an int beyond 64 bits;
///   kCorrupt for what no pickler writes. The message names opcode or global and its byte.
/// Linear in time; takes at most 12 times the bytes and some pages, whatever they are.
base::Result<Pickle> read_pickle(std::string_view bytes, const PickleRules& rules);

}  // namespace bytecheckpoint::format
