// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle/pickle_memo.h"

#include <cstdint>

#include "csrc/base/bytes.h"
#include "csrc/format/pickle/pickle_opcodes.h"

namespace bytecheckpoint::format {

base::Status check_memo(std::string_view bytes, int max_pickles) {
  base::ByteReader in(bytes);
  size_t begin = 0;
  while (in.remaining() != 0 && max_pickles > 0) {
    const size_t at = in.position();
    const auto opcode = static_cast<Opcode>(in.u8());
    uint64_t entry = 0;
    if (opcode == Opcode::kBinPut) {
      entry = in.u8();
    } else if (opcode == Opcode::kLongBinPut) {
      entry = in.u32();
    } else if (!skip_operand(opcode, &in)) {
      break;
    }
    if (!in.ok()) break;
    // A number of one byte cannot make the memo large.
    if (entry > UINT8_MAX && entry > at - begin) {
      return base::Status::make(base::Code::kCorrupt,
                                base::text("pickle: ", opcode_name(opcode), " at byte ", at, ": memo entry ", entry,
                                           " in ", at - begin, " bytes of pickle; nothing of the pickle was run"));
    }
    if (opcode == Opcode::kStop) {
      begin = in.position();
      --max_pickles;
    }
  }
  return base::Status::ok();
}

}  // namespace bytecheckpoint::format
