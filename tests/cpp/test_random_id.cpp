// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/random_id.h"

#include <set>

#include "tests/cpp/expect.h"

namespace bytecheckpoint::engine {
namespace {

TEST_CASE("random_id: ids differ") {
  std::set<base::Id> ids;
  for (int i = 0; i < 1000; ++i) ids.insert(test::value_of(draw_id()));
  CHECK(ids.size() == 1000);
}

}  // namespace
}  // namespace bytecheckpoint::engine
