// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "csrc/base/status.h"

namespace bytecheckpoint::format {

/// Checks that the first pickles in `bytes` number their memo entries as picklers do. This keeps a hostile pickle from
/// making Python's unpickler allocate much memory.
///
/// CPython's unpickler keeps the memo as an array, and LONG_BINPUT makes it as long as its operand says: 64 GiB at
/// most. (Torch's `weights_only` keeps a dict, so any number is harmless; PUT, whose operand is text, it does not
/// know.) A pickler memoises what it has written, and each entry takes at least a byte, so no number can be greater
/// than the offset of its opcode.
///
/// Stops at a byte that is no opcode, and at an opcode that is cut off, because every unpickler stops there.
/// \param max_pickles  How many pickles, one behind the other, are checked. Files of torch.save that are no archive
/// begin with five.
/// \returns kCorrupt, naming opcode and byte, if a number is too large.
base::Status check_memo(std::string_view bytes, int max_pickles);

}  // namespace bytecheckpoint::format
