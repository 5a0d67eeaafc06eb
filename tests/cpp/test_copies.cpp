// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/copies.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "tests/cpp/expect.h"
#include "tests/cpp/random_world.h"

namespace bytecheckpoint::planner {
namespace {

using Content = std::tuple<uint64_t, uint32_t, uint32_t, uint32_t>;

std::vector<std::vector<HeldCopy>> random_copies(test::Random* random, uint32_t num_ranks) {
  std::vector<std::vector<HeldCopy>> of_ranks(num_ranks);
  for (auto& copies : of_ranks) {
    for (uint64_t key = 0; key < 12; ++key) {
      if (test::draw(random, 0, 3) == 0) continue;
      copies.push_back({key << 60 | key, static_cast<uint32_t>(test::draw(random, 0, 2)),
                        static_cast<uint32_t>(test::draw(random, 0, 2)),
                        static_cast<uint32_t>(test::draw(random, 0, 1))});
    }
    sort_copies(&copies);
  }
  return of_ranks;
}

TEST_CASE("copies: merging keeps each content once with all its ranks, in any order and over a tree") {
  test::Random random(44);
  for (int round = 0; round < 200; ++round) {
    const auto num_ranks = static_cast<uint32_t>(test::draw(&random, 1, 9));
    const auto of_ranks = random_copies(&random, num_ranks);
    std::map<Content, std::set<uint32_t>> wanted;
    std::vector<std::string> blobs;
    std::vector<EncodedCopies> encoded;
    for (const auto& copies : of_ranks) blobs.push_back(encode_copies(copies));
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
      encoded.push_back({blobs[rank], rank});
      for (const HeldCopy& copy : of_ranks[rank]) wanted[{copy.key, copy.mesh, copy.how, copy.checksum}].insert(rank);
    }
    const Copies merged = test::value_of(merge_copies(encoded));
    std::map<Content, std::set<uint32_t>> got;
    for (const Copies::Variant& variant : merged.variants) {
      auto& ranks = got[{variant.copy.key, variant.copy.mesh, variant.copy.how, variant.copy.checksum}];
      REQUIRE(ranks.empty());
      merged.rank_sets.for_each(variant.ranks, [&](uint32_t rank) { ranks.insert(rank); });
    }
    REQUIRE(got == wanted);
    const auto half = encoded.begin() + static_cast<std::ptrdiff_t>(test::draw(&random, 0, num_ranks - 1));
    const std::string low = encode_copies(test::value_of(merge_copies({encoded.begin(), half})));
    const std::string high = encode_copies(test::value_of(merge_copies({half, encoded.end()})));
    REQUIRE(encode_copies(test::value_of(merge_copies({{high}, {low}}))) == encode_copies(merged));
  }
}

TEST_CASE("copies: every cut of the bytes is damage") {
  const std::string blob = encode_copies({{1, 2, 3, 4}, {5, 6, 7, 8}});
  CHECK(merge_copies({{blob}}).is_ok());
  for (size_t size = 0; size < blob.size(); ++size) {
    CHECK(merge_copies({{std::string_view(blob).substr(0, size)}}).status().code() == base::Code::kCorrupt);
  }
  CHECK_FALSE(merge_copies({{blob + '\0'}}).is_ok());
}

TEST_CASE("copies: a message is an inventory, and maybe copies") {
  CHECK(join_message("inventory", "") == "inventory");
  CHECK(split_message("inventory") == std::pair<std::string_view, std::string_view>("inventory", ""));
  const std::string message = join_message("inventory", "copies");
  CHECK(split_message(message) == std::pair<std::string_view, std::string_view>("inventory", "copies"));
  CHECK(split_message(std::string_view(message).substr(0, 5)).second.empty());
}

TEST_CASE("copies: keys depend on name and box") {
  const int64_t box[] = {0, 4, 2, 2}, other[] = {4, 0, 2, 2};
  std::set<uint64_t> keys = {key_of_copy("a", box, 2), key_of_copy("a", other, 2), key_of_copy("b", box, 2),
                             key_of_copy("a", box, 0), key_of_copy("a", box, 1)};
  CHECK(keys.size() == 5);
  CHECK(key_of_copy("a", box, 2) == key_of_copy("a", box, 2));
}

TEST_CASE("copies: hashes of groups change with each copy of the group, and with no other") {
  const std::vector<HeldCopy> copies = {{1, 0, 1, 10}, {2, 0, 1, 20}, {3, 0, 1, 30}};
  const std::string groups = {1, 7, 1, 0, 1, 9};  // one copy of group 7, one that is not compared, one of group 9
  const std::string hashes = test::value_of(hashes_of_groups(copies, groups));
  REQUIRE(hashes.size() == 2 * 12);
  for (size_t changed = 0; changed < copies.size(); ++changed) {
    std::vector<HeldCopy> other = copies;
    ++other[changed].checksum;
    const std::string got = test::value_of(hashes_of_groups(other, groups));
    CHECK((got.substr(0, 12) != hashes.substr(0, 12)) == (changed == 0));
    CHECK((got.substr(12) != hashes.substr(12)) == (changed == 2));
  }
  CHECK(test::value_of(hashes_of_groups({}, "")).empty());
  CHECK_FALSE(hashes_of_groups(copies, std::string_view(groups).substr(2)).is_ok());
  CHECK_FALSE(hashes_of_groups({}, groups).is_ok());
}

}  // namespace
}  // namespace bytecheckpoint::planner
