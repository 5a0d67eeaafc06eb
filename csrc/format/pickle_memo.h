// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "csrc/base/status.h"

namespace bytecheckpoint::format {

/// Do the first few pickles of `bytes`, one behind the other, number their memo entries as picklers do?
///
/// CPython's unpickler keeps the memo as an array: LONG_BINPUT makes it as long as it says, 64 GiB at most. Torch's
/// `weights_only` keeps a dict, and lets the number pass; PUT, whose number is a text, it does not know. A pickler
/// memoises what it has written, and an entry takes a byte at least, so that no number is greater than the offset of
/// its opcode.
///
/// Reads no further than to what is no opcode, or is cut off: there every unpickler stops.
/// \param max_pickles  Files of torch.save that are no archive begin with five.
/// \returns kCorrupt, naming opcode and byte.
base::Status check_memo(std::string_view bytes, int max_pickles);

}  // namespace bytecheckpoint::format
