// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle/pickle_opcodes.h"

#include <algorithm>
#include <cstring>

#include "csrc/base/status.h"

namespace bytecheckpoint::format {
namespace {

enum class Operand : uint8_t {
  kFixed,    // `size` bytes
  kCounted,  // a count of bytes, in `size` bytes, then the bytes
  kLines,    // `size` lines, each with its newline
};

struct OpcodeEntry {
  uint8_t opcode;
  const char* name;
  Operand operand = Operand::kFixed;
  uint8_t size = 0;
};

constexpr OpcodeEntry kOpcodes[] = {
    {'(', "MARK"},
    {')', "EMPTY_TUPLE"},
    {'.', "STOP"},
    {'0', "POP"},
    {'1', "POP_MARK"},
    {'2', "DUP"},
    {'B', "BINBYTES", Operand::kCounted, 4},
    {'C', "SHORT_BINBYTES", Operand::kCounted, 1},
    {'F', "FLOAT", Operand::kLines, 1},
    {'G', "BINFLOAT", Operand::kFixed, 8},
    {'I', "INT", Operand::kLines, 1},
    {'J', "BININT", Operand::kFixed, 4},
    {'K', "BININT1", Operand::kFixed, 1},
    {'L', "LONG", Operand::kLines, 1},
    {'M', "BININT2", Operand::kFixed, 2},
    {'N', "NONE"},
    {'P', "PERSID", Operand::kLines, 1},
    {'Q', "BINPERSID"},
    {'R', "REDUCE"},
    {'S', "STRING", Operand::kLines, 1},
    {'T', "BINSTRING", Operand::kCounted, 4},
    {'U', "SHORT_BINSTRING", Operand::kCounted, 1},
    {'V', "UNICODE", Operand::kLines, 1},
    {'X', "BINUNICODE", Operand::kCounted, 4},
    {']', "EMPTY_LIST"},
    {'a', "APPEND"},
    {'b', "BUILD"},
    {'c', "GLOBAL", Operand::kLines, 2},
    {'d', "DICT"},
    {'e', "APPENDS"},
    {'g', "GET", Operand::kLines, 1},
    {'h', "BINGET", Operand::kFixed, 1},
    {'i', "INST", Operand::kLines, 2},
    {'j', "LONG_BINGET", Operand::kFixed, 4},
    {'l', "LIST"},
    {'o', "OBJ"},
    {'p', "PUT", Operand::kLines, 1},
    {'q', "BINPUT", Operand::kFixed, 1},
    {'r', "LONG_BINPUT", Operand::kFixed, 4},
    {'s', "SETITEM"},
    {'t', "TUPLE"},
    {'u', "SETITEMS"},
    {'}', "EMPTY_DICT"},
    {0x80, "PROTO", Operand::kFixed, 1},
    {0x81, "NEWOBJ"},
    {0x82, "EXT1", Operand::kFixed, 1},
    {0x83, "EXT2", Operand::kFixed, 2},
    {0x84, "EXT4", Operand::kFixed, 4},
    {0x85, "TUPLE1"},
    {0x86, "TUPLE2"},
    {0x87, "TUPLE3"},
    {0x88, "NEWTRUE"},
    {0x89, "NEWFALSE"},
    {0x8A, "LONG1", Operand::kCounted, 1},
    {0x8B, "LONG4", Operand::kCounted, 4},
    {0x8C, "SHORT_BINUNICODE", Operand::kCounted, 1},
    {0x8D, "BINUNICODE8", Operand::kCounted, 8},
    {0x8E, "BINBYTES8", Operand::kCounted, 8},
    {0x8F, "EMPTY_SET"},
    {0x90, "ADDITEMS"},
    {0x91, "FROZENSET"},
    {0x92, "NEWOBJ_EX"},
    {0x93, "STACK_GLOBAL"},
    {0x94, "MEMOIZE"},
    {0x95, "FRAME", Operand::kFixed, 8},
    {0x96, "BYTEARRAY8", Operand::kCounted, 8},
    {0x97, "NEXT_BUFFER"},
    {0x98, "READONLY_BUFFER"},
};

const OpcodeEntry* find_entry(Opcode opcode) {
  for (const OpcodeEntry& entry : kOpcodes) {
    if (entry.opcode == static_cast<uint8_t>(opcode)) return &entry;
  }
  return nullptr;
}

/// Decodes two's complement, little-endian. Returns nothing if more than 64 bits are needed; bytes behind the eighth
/// may only repeat the sign.
std::optional<int64_t> long_int(std::string_view bytes) {
  const bool negative = !bytes.empty() && (bytes.back() & 0x80) != 0;
  uint64_t bits = negative ? ~uint64_t{0} : 0;
  if (!bytes.empty()) std::memcpy(&bits, bytes.data(), std::min(bytes.size(), sizeof bits));
  const auto number = static_cast<int64_t>(bits);
  bool fits = (number < 0) == negative;
  for (size_t i = sizeof bits; i < bytes.size(); ++i) fits = fits && bytes[i] == (negative ? '\xFF' : '\0');
  return fits ? std::make_optional(number) : std::nullopt;
}

}  // namespace

bool is_opcode(Opcode opcode) {
  return find_entry(opcode) != nullptr;
}

std::string opcode_name(Opcode opcode) {
  const auto byte = static_cast<uint8_t>(opcode);
  const std::string digits = base::to_hex(&byte, 1);
  const OpcodeEntry* entry = find_entry(opcode);
  return entry == nullptr ? base::text("byte 0x", digits) : base::text(entry->name, " (0x", digits, ")");
}

bool skip_operand(Opcode opcode, base::ByteReader* in) {
  const OpcodeEntry* entry = find_entry(opcode);
  if (entry == nullptr) return false;
  switch (entry->operand) {
    case Operand::kFixed:
      in->skip(entry->size);
      return in->ok();
    case Operand::kCounted:
      in->skip(entry->size == 1 ? in->u8() : entry->size == 4 ? in->u32() : in->u64());
      return in->ok();
    case Operand::kLines:
      break;
  }
  for (int line = 0; line < entry->size; ++line) {
    while (in->u8() != '\n') {
      if (!in->ok()) return false;
    }
  }
  return true;
}

std::string_view read_text_operand(Opcode opcode, base::ByteReader* in) {
  switch (opcode) {
    case Opcode::kShortBinUnicode:
    case Opcode::kShortBinBytes:
    case Opcode::kLong1:
      return in->view(in->u8());
    case Opcode::kBinUnicode:
    case Opcode::kBinBytes:
      return in->view(in->u32());
    default:  // kBinUnicode8, kByteArray8
      return in->view(in->u64());
  }
}

std::optional<int64_t> read_int_operand(Opcode opcode, base::ByteReader* in) {
  switch (opcode) {
    case Opcode::kBinInt1:
      return in->u8();
    case Opcode::kBinInt2:
      return in->u16();
    case Opcode::kBinInt:
      return static_cast<int32_t>(in->u32());
    default:  // kLong1
      return long_int(in->view(in->u8()));
  }
}

}  // namespace bytecheckpoint::format
