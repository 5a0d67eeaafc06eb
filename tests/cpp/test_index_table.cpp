// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/index_table.h"

#include <random>
#include <string>
#include <vector>

#include "tests/cpp/expect.h"

namespace bytecheckpoint::base {
namespace {

TEST_CASE("index_table: finds what was inserted, whatever the hashes") {
  for (const uint64_t mask : {uint64_t{0}, uint64_t{7}, ~uint64_t{0}}) {  // all equal, few different, many different
    std::mt19937_64 random(2);
    IndexTable table;
    std::vector<uint64_t> values;
    for (uint32_t i = 0; i < 500; ++i) {
      const uint64_t value = random();
      const auto is_same = [&](uint32_t index) { return values[index] == value; };
      CHECK(table.find(value & mask, is_same) == IndexTable::kNone);
      values.push_back(value);
      table.insert(value & mask, i);
      CHECK(table.find(value & mask, is_same) == i);
    }
    for (uint32_t i = 0; i < values.size(); ++i) {
      CHECK(table.find(values[i] & mask, [&](uint32_t index) { return values[index] == values[i]; }) == i);
    }
    CHECK(table.size() == values.size());
  }
}

}  // namespace
}  // namespace bytecheckpoint::base
