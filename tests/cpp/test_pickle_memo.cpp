// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle/pickle_memo.h"

#include <string>

#include "tests/cpp/expect.h"
#include "tests/cpp/pickle_parts.h"
#include "tests/cpp/sample_file.h"

namespace bytecheckpoint::format {
namespace {

using namespace std::string_literals;  // NOLINT: many parts hold zeros
using namespace test::pickled;         // NOLINT

TEST_CASE("pickle_memo: no entry has a greater number than bytes stand before it, or than 255") {
  EXPECT_OK(check_memo(whole("Nq\xFF"), 1));
  EXPECT_OK(check_memo(whole("N" + put(255)), 1));
  EXPECT_FAILURE(kCorrupt, "LONG_BINPUT (0x72) at byte 3: memo entry 256 in 3 bytes of pickle",
                 check_memo(whole("N" + put(256)), 1));
  EXPECT_FAILURE(kCorrupt, "memo entry 4294967295", check_memo(whole("N" + put(0xFFFFFFFF)), 1));
  const std::string long_text = text(std::string(300, 'x'));
  EXPECT_OK(check_memo(whole(long_text + put(307)), 1));
  EXPECT_FAILURE(kCorrupt, "entry 308", check_memo(whole(long_text + put(308)), 1));
}

TEST_CASE("pickle_memo: operands are no opcodes, whatever they hold") {
  const std::string far = put(0xFFFFFFFF);
  for (const std::string& value :
       {text(far), "U\5"s + far, "C\5"s + far, "B\5\0\0\0"s + far, "T\5\0\0\0"s + far, "\x8A\5"s + far,
        "\x8B\5\0\0\0"s + far, "\x8C\5"s + far, "\x8D\5\0\0\0\0\0\0\0"s + far, "\x8E\5\0\0\0\0\0\0\0"s + far,
        "\x96\5\0\0\0\0\0\0\0"s + far, "G" + far + "123", "J" + far.substr(0, 4), global(far, far), "V" + far + "\n"}) {
    EXPECT_OK(check_memo(whole(value), 1));
    EXPECT_FAILURE(kCorrupt, "memo entry", check_memo(whole(value + far), 1));
  }
}

TEST_CASE("pickle_memo: several pickles count by themselves, and what follows them is none") {
  const std::string long_text = whole(text(std::string(300, 'x')));
  const std::string far = whole("N" + put(256));
  EXPECT_FAILURE(kCorrupt, "at byte 311: memo entry 256 in 3 bytes of pickle", check_memo(long_text + far, 2));
  EXPECT_OK(check_memo(long_text + far, 1));
  EXPECT_OK(check_memo("\xFF" + far, 1));
  EXPECT_OK(check_memo(text("cut").substr(0, 6), 1));
  EXPECT_OK(check_memo("N" + put(256).substr(0, 4), 1));
  EXPECT_OK(check_memo("cmodule", 1));
}

TEST_CASE("pickle_memo: whatever picklers wrote is let in") {
  for (const char* name : {"stock.metadata", "protocol2.metadata", "older.metadata", "olmo.metadata"}) {
    EXPECT_OK(check_memo(test::sample_file(name), 1));
  }
}

}  // namespace
}  // namespace bytecheckpoint::format
