// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/random_id.h"

#include <chrono>
#include <set>
#include <thread>

#include "tests/cpp/expect.h"

namespace bytecheckpoint::engine {
namespace {

TEST_CASE("random_id: ids differ") {
  std::set<base::Id> ids;
  for (int i = 0; i < 1000; ++i) ids.insert(test::value_of(draw_id()));
  CHECK(ids.size() == 1000);
}

TEST_CASE("random_id: ids of saves differ, and say when the save began") {
  std::set<base::Id> ids;
  for (int i = 0; i < 1000; ++i) ids.insert(test::value_of(draw_save_id()));
  CHECK(ids.size() == 1000);
  const auto now = std::chrono::system_clock::now().time_since_epoch() / std::chrono::milliseconds(1);
  const base::Id id = *ids.rbegin();
  int64_t began_ms = 0;
  for (int i = 0; i < 6; ++i) began_ms = began_ms << 8 | id[i];
  CHECK(began_ms <= now);
  CHECK(began_ms > now - 60'000);
  CHECK((id[6] & 0xf0) == 0x70);
  CHECK((id[8] & 0xc0) == 0x80);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  CHECK(test::value_of(draw_save_id()) > id);
}

}  // namespace
}  // namespace bytecheckpoint::engine
