// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle/pickle_opcodes.h"

#include <doctest/doctest.h>

#include "tests/cpp/pickle_parts.h"

namespace bytecheckpoint::format {
namespace {

TEST_CASE("pickle_opcodes: every byte is an opcode or none, and has a name") {
  for (int byte = 0; byte < 256; ++byte) {
    const bool known = test::pickled::kOpcodes.find(static_cast<char>(byte)) != test::pickled::kOpcodes.npos;
    CHECK(is_opcode(static_cast<Opcode>(byte)) == known);
  }
  CHECK(opcode_name(Opcode::kBinPut) == "BINPUT (0x71)");
  CHECK(opcode_name(static_cast<Opcode>(0xFF)) == "byte 0xff");
}

}  // namespace
}  // namespace bytecheckpoint::format
