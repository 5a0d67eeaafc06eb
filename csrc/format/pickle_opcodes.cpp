// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle_opcodes.h"

#include "csrc/base/bytes.h"
#include "csrc/base/status.h"

namespace bytecheckpoint::format {
namespace {

struct Name {
  uint8_t opcode;
  const char* name;
};

constexpr Name kNames[] = {
    {'(', "MARK"},          {')', "EMPTY_TUPLE"},
    {'.', "STOP"},          {'0', "POP"},
    {'1', "POP_MARK"},      {'2', "DUP"},
    {'B', "BINBYTES"},      {'C', "SHORT_BINBYTES"},
    {'F', "FLOAT"},         {'G', "BINFLOAT"},
    {'I', "INT"},           {'J', "BININT"},
    {'K', "BININT1"},       {'L', "LONG"},
    {'M', "BININT2"},       {'N', "NONE"},
    {'P', "PERSID"},        {'Q', "BINPERSID"},
    {'R', "REDUCE"},        {'S', "STRING"},
    {'T', "BINSTRING"},     {'U', "SHORT_BINSTRING"},
    {'V', "UNICODE"},       {'X', "BINUNICODE"},
    {']', "EMPTY_LIST"},    {'a', "APPEND"},
    {'b', "BUILD"},         {'c', "GLOBAL"},
    {'d', "DICT"},          {'e', "APPENDS"},
    {'g', "GET"},           {'h', "BINGET"},
    {'i', "INST"},          {'j', "LONG_BINGET"},
    {'l', "LIST"},          {'o', "OBJ"},
    {'p', "PUT"},           {'q', "BINPUT"},
    {'r', "LONG_BINPUT"},   {'s', "SETITEM"},
    {'t', "TUPLE"},         {'u', "SETITEMS"},
    {'}', "EMPTY_DICT"},    {0x80, "PROTO"},
    {0x81, "NEWOBJ"},       {0x82, "EXT1"},
    {0x83, "EXT2"},         {0x84, "EXT4"},
    {0x85, "TUPLE1"},       {0x86, "TUPLE2"},
    {0x87, "TUPLE3"},       {0x88, "NEWTRUE"},
    {0x89, "NEWFALSE"},     {0x8A, "LONG1"},
    {0x8B, "LONG4"},        {0x8C, "SHORT_BINUNICODE"},
    {0x8D, "BINUNICODE8"},  {0x8E, "BINBYTES8"},
    {0x8F, "EMPTY_SET"},    {0x90, "ADDITEMS"},
    {0x91, "FROZENSET"},    {0x92, "NEWOBJ_EX"},
    {0x93, "STACK_GLOBAL"}, {0x94, "MEMOIZE"},
    {0x95, "FRAME"},        {0x96, "BYTEARRAY8"},
    {0x97, "NEXT_BUFFER"},  {0x98, "READONLY_BUFFER"},
};

const char* find_name(Opcode opcode) {
  for (const Name& entry : kNames) {
    if (entry.opcode == static_cast<uint8_t>(opcode)) return entry.name;
  }
  return nullptr;
}

}  // namespace

bool is_opcode(Opcode opcode) {
  return find_name(opcode) != nullptr;
}

std::string opcode_name(Opcode opcode) {
  const auto byte = static_cast<uint8_t>(opcode);
  const std::string digits = base::to_hex(&byte, 1);
  const char* name = find_name(opcode);
  return name == nullptr ? base::text("byte 0x", digits) : base::text(name, " (0x", digits, ")");
}

}  // namespace bytecheckpoint::format
