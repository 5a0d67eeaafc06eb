// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/join_replicas.h"

#include <algorithm>
#include <map>
#include <set>

#include "csrc/planner/box_order.h"
#include "csrc/planner/box_words.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/random_box.h"

namespace bytecheckpoint::planner {
namespace {

using Numbers = std::vector<int64_t>;

/// Boxes in memory, each held by one rank.
struct Boxes {
  Numbers sizes;
  bool is_wide = false;
  std::vector<Numbers> boxes;
  std::vector<RankSets::Id> holders;
  std::vector<uint32_t> words;

  FoundBoxes found() {
    words.clear();
    for (const Numbers& box : boxes) {
      words.resize(words.size() + num_words(box.size(), is_wide));
      pack_numbers(box.data(), box.size(), is_wide, words.data() + words.size() - num_words(box.size(), is_wide));
    }
    return {"w", sizes.data(), sizes.size(), is_wide, words.data(), holders.data(), boxes.size()};
  }
};

/// Draws boxes of few different kinds. Some lie outside the tensor, because they are joined before that is checked.
/// Each rank has each box at most once.
Boxes draw_boxes(test::Random* random) {
  Boxes drawn;
  drawn.is_wide = test::draw(random, 0, 1) != 0;
  const auto num_dims = static_cast<size_t>(test::draw(random, 1, 3));
  for (size_t d = 0; d < num_dims; ++d) drawn.sizes.push_back(test::draw(random, 0, 4));
  std::set<std::pair<Numbers, uint32_t>> pairs;
  const int64_t num_boxes = test::draw(random, 1, 60);
  for (int64_t i = 0; i < num_boxes; ++i) {
    Numbers box;
    for (size_t n = 0; n < 2 * num_dims; ++n) {
      box.push_back(test::draw(random, 0, 3));
      if (drawn.is_wide && test::draw(random, 0, 5) == 0) box.back() += box.back() << 40;
    }
    pairs.emplace(box, static_cast<uint32_t>(test::draw(random, 0, 30)));
  }
  std::vector<std::pair<Numbers, uint32_t>> in_order(pairs.begin(), pairs.end());
  switch (test::draw(random, 0, 2)) {
    case 0:  // by rank: for each rank an ascending sequence
      std::stable_sort(in_order.begin(), in_order.end(), [](auto& a, auto& b) { return a.second < b.second; });
      break;
    case 1:
      std::shuffle(in_order.begin(), in_order.end(), *random);
  }
  for (auto& [box, rank] : in_order) {
    drawn.boxes.push_back(box);
    drawn.holders.push_back(RankSets::single(rank));
  }
  return drawn;
}

TEST_CASE("join_replicas: each box once, in order, with all its holders") {
  test::Random random(70);
  RankSets sets;
  ReplicaJoiner joiner(&sets);
  for (int round = 0; round < 3000; ++round) {
    Boxes drawn = draw_boxes(&random);
    using Key = std::pair<uint64_t, Numbers>;
    std::map<Key, std::set<uint32_t>> wanted;
    for (size_t i = 0; i < drawn.boxes.size(); ++i) {
      const Numbers& box = drawn.boxes[i];
      wanted[{first_position(drawn.sizes.data(), box.data(), drawn.sizes.size()), box}].insert(drawn.holders[i]);
    }
    const FoundBoxes found = drawn.found();
    // Either where the boxes are, or elsewhere.
    std::vector<uint32_t> words(drawn.words.size());
    std::vector<RankSets::Id> holders(drawn.holders.size());
    const bool is_in_place = round % 2 == 0;
    uint32_t* const to = is_in_place ? drawn.words.data() : words.data();
    RankSets::Id* const holders_to = is_in_place ? drawn.holders.data() : holders.data();
    REQUIRE(test::value_of(joiner.join(found, to, holders_to)) == wanted.size());
    const uint32_t* at = to;
    size_t number = 0;
    for (const auto& [key, ranks] : wanted) {
      Numbers box(key.second.size());
      unpack_numbers(at, box.size(), drawn.is_wide, box.data());
      REQUIRE(box == key.second);
      at += num_words(box.size(), drawn.is_wide);
      std::set<uint32_t> joined;
      sets.for_each(holders_to[number++], [&](uint32_t rank) { joined.insert(rank); });
      REQUIRE(joined == ranks);
    }
  }
}

TEST_CASE("join_replicas: a rank that has a box in two inventories is named") {
  RankSets sets;
  Boxes twice{{8}, false, {{4, 4}, {0, 4}, {4, 4}}, {3, 1, 3}, {}};
  const FoundBoxes found = twice.found();
  EXPECT_FAILURE(kCorrupt, "'w': two inventories say what rank 3 holds",
                 ReplicaJoiner(&sets).join(found, found.words, found.holders));
}

TEST_CASE("join_replicas: wide numbers compare as narrow ones do") {
  const Numbers numbers = {0, 1, UINT32_MAX, int64_t{UINT32_MAX} + 1, int64_t{5} << 33, INT64_MAX};
  CHECK_FALSE(needs_wide(numbers.data(), 3));
  CHECK(needs_wide(numbers.data(), 4));
  for (const int64_t a : numbers) {
    for (const int64_t b : numbers) {
      uint32_t words[4];
      CHECK(pack_numbers(&b, 1, true, pack_numbers(&a, 1, true, words)) == words + 4);
      CHECK(unpack_number(words, 0, true) == a);
      CHECK(unpack_number(words, 1, true) == b);
      CHECK(compare_words(words, words + 2, 2) == (a < b ? -1 : a > b ? 1 : 0));
    }
  }
}

}  // namespace
}  // namespace bytecheckpoint::planner
