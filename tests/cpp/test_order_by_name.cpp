// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/order_by_name.h"

#include <numeric>
#include <string>

#include "tests/cpp/expect.h"
#include "tests/cpp/random_box.h"

namespace bytecheckpoint::base {
namespace {

std::vector<uint32_t> ordered(const std::vector<std::string>& names) {
  return order_by_name(names.size(), [&](uint32_t n) -> std::string_view { return names[n]; });
}

std::vector<uint32_t> compared_one_by_one(const std::vector<std::string>& names) {
  std::vector<uint32_t> numbers(names.size());
  std::iota(numbers.begin(), numbers.end(), 0);
  std::stable_sort(numbers.begin(), numbers.end(), [&](uint32_t a, uint32_t b) { return names[a] < names[b]; });
  return numbers;
}

TEST_CASE("order_by_name: no name, one name, and names that are beginnings of others") {
  using namespace std::string_literals;
  CHECK(ordered({}).empty());
  CHECK(ordered({"w"}) == std::vector<uint32_t>{0});
  CHECK(ordered({""}) == std::vector<uint32_t>{0});
  CHECK(ordered({"layer", "lay", "", "layer.1"}) == std::vector<uint32_t>{2, 1, 0, 3});
  // A zero byte is behind the end of the name, and bytes from 128 on are behind all others.
  CHECK(ordered({"a\0\0"s, "a"s, "a\0"s}) == std::vector<uint32_t>{1, 2, 0});
  CHECK(ordered({"\xC3\xA4", "z", "\x7F"}) == std::vector<uint32_t>{1, 2, 0});
}

TEST_CASE("order_by_name: equal names keep their order") {
  CHECK(ordered({"b", "a", "b", "a"}) == std::vector<uint32_t>{1, 3, 0, 2});
  CHECK(ordered(std::vector<std::string>(5, "same")) == std::vector<uint32_t>{0, 1, 2, 3, 4});
}

TEST_CASE("order_by_name: as a comparison of whole names, for names that begin alike") {
  test::Random random(3);
  for (int round = 0; round < 300; ++round) {
    const std::string prefix(static_cast<size_t>(test::draw(&random, 0, 12)), 'p');
    std::vector<std::string> names;
    for (int64_t n = test::draw(&random, 0, 60); n > 0; --n) {
      std::string name = prefix;
      for (int64_t i = test::draw(&random, 0, 20); i > 0; --i) {
        name.push_back(static_cast<char>(test::draw(&random, 0, 2) == 0 ? test::draw(&random, 0, 255) : 'a'));
      }
      names.push_back(name);
    }
    REQUIRE(ordered(names) == compared_one_by_one(names));
  }
}

}  // namespace
}  // namespace bytecheckpoint::base
