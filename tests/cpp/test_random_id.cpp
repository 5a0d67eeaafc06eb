// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/random_id.h"

#include <chrono>
#include <set>

#include "tests/cpp/expect.h"

namespace bytecheckpoint::engine {
namespace {

TEST_CASE("random_id: ids differ") {
  std::set<base::Id> ids;
  for (int i = 0; i < 1000; ++i) ids.insert(test::value_of(draw_id()));
  CHECK(ids.size() == 1000);
}

TEST_CASE("random_id: ids of saves differ, and say when the save began") {
  base::Id before = test::value_of(draw_save_id());
  for (int i = 0; i < 1000; ++i) {
    const base::Id id = test::value_of(draw_save_id());
    CHECK(id > before);
    before = id;
  }
  const auto now = std::chrono::system_clock::now().time_since_epoch() / std::chrono::milliseconds(1);
  const base::Id id = before;
  int64_t began_ms = 0;
  for (int i = 0; i < 6; ++i) began_ms = began_ms << 8 | id[i];
  CHECK(began_ms <= now + 1001);  // those of one millisecond get later ones
  CHECK(began_ms > now - 60'000);
  CHECK((id[6] & 0xf0) == 0x70);
  CHECK((id[8] & 0xc0) == 0x80);
}

TEST_CASE("random_id: ids of saves are later than what was loaded, unless that is of a clock that nobody believes") {
  const auto began_ms = [] {
    const base::Id id = test::value_of(draw_save_id());
    int64_t ms = 0;
    for (int i = 0; i < 6; ++i) ms = ms << 8 | id[i];
    return ms;
  };
  const int64_t now = began_ms();
  draw_save_ids_after(now - 3'600'000);
  CHECK(began_ms() < now + 60'000);
  draw_save_ids_after(now + 3'600'000);
  CHECK(began_ms() == now + 3'600'001);
  CHECK(began_ms() == now + 3'600'002);
  draw_save_ids_after(now + 25 * 3'600'000);
  CHECK(began_ms() < now + 60'000);
}

}  // namespace
}  // namespace bytecheckpoint::engine
