// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "csrc/base/bytes.h"

namespace bytecheckpoint::format {

/// The opcodes of pickle that are interpreted here. Source: CPython, Lib/pickletools.py.
enum class Opcode : uint8_t {
  kMark = '(',
  kEmptyTuple = ')',
  kStop = '.',
  kBinBytes = 'B',
  kShortBinBytes = 'C',
  kBinFloat = 'G',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kNone = 'N',
  kBinPersId = 'Q',
  kReduce = 'R',
  kBinUnicode = 'X',
  kEmptyList = ']',
  kAppend = 'a',
  kBuild = 'b',
  kGlobal = 'c',
  kAppends = 'e',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kTuple = 't',
  kSetItems = 'u',
  kEmptyDict = '}',
  kProto = 0x80,
  kNewObj = 0x81,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8A,
  kShortBinUnicode = 0x8C,
  kBinUnicode8 = 0x8D,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
  // Only where PickleRules::standard_types lets them in.
  kEmptySet = 0x8F,
  kAddItems = 0x90,
  kFrozenSet = 0x91,
  kByteArray8 = 0x96,
};

/// Is the byte an opcode of any protocol up to 5, interpreted here or not?
bool is_opcode(Opcode opcode);

/// `EXT1 (0x82)`, or `byte 0xff` if there is no such opcode.
std::string opcode_name(Opcode opcode);

/// Skips what follows an opcode of any protocol up to 5. False, of a cut off one and of what is no opcode.
bool skip_operand(Opcode opcode, base::ByteReader* in);

/// What follows the opcode of a string, of bytes, or of a LONG1. The reader says whether all of it was there.
std::string_view read_text_operand(Opcode opcode, base::ByteReader* in);
/// The same of an int; nothing if it does not fit into 64 bits.
std::optional<int64_t> read_int_operand(Opcode opcode, base::ByteReader* in);

}  // namespace bytecheckpoint::format
