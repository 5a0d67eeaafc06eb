// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

#include "csrc/base/status.h"
#include "csrc/format/pickle/pickle_values.h"

namespace bytecheckpoint::format {

/// What a reader of pickles accepts.
struct PickleRules {
  /// Returns the caller's number for a global that the pickle may name, nullopt for one that it may not.
  std::function<std::optional<uint32_t>(std::string_view module, std::string_view name)> global;
  bool persistent_ids = false;  // whether BINPERSID is accepted
  /// Also accept sets, frozensets, bytearrays, ints of up to 255 bytes, and objects that are filled as lists or dicts
  /// are.
  bool standard_types = false;
};

/// Interprets the opcodes of a pickle and returns a description of its values. Nothing is imported, called or
/// instantiated.
///
/// Knows the opcodes that the picklers of DCP and torch.save write, protocols 2 to 5, and no others.
/// \param bytes  At most 2 GiB. Must outlive the result, which refers to them. May go on behind the STOP; see
/// `Pickle::end`.
/// \returns kUnsupported for other opcodes, globals that the rules do not accept, and ints beyond 64 bits; kCorrupt for
/// what no pickler writes. The message names the opcode or global and its byte.
/// Linear in time. Takes at most 12 times the size of the bytes and some pages of memory, whatever they are.
base::Result<Pickle> read_pickle(std::string_view bytes, const PickleRules& rules);

}  // namespace bytecheckpoint::format
