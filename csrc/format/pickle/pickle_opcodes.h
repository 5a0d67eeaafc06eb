// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "csrc/base/bytes.h"

namespace bytecheckpoint::format {

/// The opcodes of pickle that we interpret. Source: CPython, Lib/pickletools.py.
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
  // Only interpreted if PickleRules::standard_types is set:
  kEmptySet = 0x8F,
  kAddItems = 0x90,
  kFrozenSet = 0x91,
  kByteArray8 = 0x96,
};

/// Returns whether the byte is an opcode of any protocol up to 5, interpreted here or not.
bool is_opcode(Opcode opcode);

/// Returns `EXT1 (0x82)`, or `byte 0xff` if there is no such opcode. For messages.
std::string opcode_name(Opcode opcode);

/// Skips the operand of an opcode of any protocol up to 5. \returns false if it is cut off, or if there is no such
/// opcode.
bool skip_operand(Opcode opcode, base::ByteReader* in);

/// Reads the operand of an opcode that makes a string, bytes or a long int. If it is cut off, `in->ok()` becomes false.
std::string_view read_text_operand(Opcode opcode, base::ByteReader* in);
/// Reads the operand of an opcode that makes an int. \returns nothing if the number does not fit into 64 bits.
std::optional<int64_t> read_int_operand(Opcode opcode, base::ByteReader* in);

}  // namespace bytecheckpoint::format
