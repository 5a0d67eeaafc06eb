// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/tree.h"

#include <doctest/doctest.h>

#include <limits>

#include "tests/cpp/expect.h"
#include "tests/cpp/random_tree.h"

namespace bytecheckpoint::format {
namespace {

using test::draw_tree;
using test::Random;
using test::written_anew;

std::string nested_lists(int depth) {
  base::ByteWriter out;
  for (int i = 0; i < depth; ++i) {
    out.u8(static_cast<uint8_t>(Tree::Kind::kList));
    out.u32(1);
  }
  out.u8(static_cast<uint8_t>(Tree::Kind::kNone));
  return out.take();
}

TEST_CASE("tree: random trees come back equal") {
  Random random(8);
  for (int round = 0; round < 2000; ++round) {
    const Tree tree = draw_tree(&random, 5);
    CHECK(test::value_of(decode_tree(tree.bytes())) == tree);
    CHECK(written_anew(tree) == tree.bytes());
  }
}

TEST_CASE("tree: a value can be skipped with all that is in it") {
  Random random(12);
  for (int round = 0; round < 200; ++round) {
    const Tree first = draw_tree(&random, 5), second = draw_tree(&random, 5);
    const Tree both = test::holding(Tree::Kind::kList, {first, second});
    TreeReader in(both);
    CHECK(in.next().num_children == 2);
    in.skip();
    CHECK(in.position() == kContainerBytes + first.bytes().size());
    in.skip();
    CHECK(in.position() == both.bytes().size());
  }
  CHECK(Tree() == test::leaf(Tree::Kind::kNone));
}

TEST_CASE("tree: equality tells kinds, signs of zero and NaNs apart") {
  CHECK_FALSE(test::real(0.0) == test::real(-0.0));
  const Tree nan = test::real(std::numeric_limits<double>::quiet_NaN());
  CHECK(test::value_of(decode_tree(nan.bytes())) == nan);
  CHECK_FALSE(test::holding(Tree::Kind::kList, {}) == test::holding(Tree::Kind::kTuple, {}));
}

TEST_CASE("tree: what is cut anywhere, or followed by anything, is corrupt") {
  Random random(9);
  for (int round = 0; round < 100; ++round) {
    const std::string bytes = draw_tree(&random, 4).bytes();
    for (size_t size = 0; size < bytes.size(); ++size) EXPECT_CODE(kCorrupt, decode_tree(bytes.substr(0, size)));
    EXPECT_CODE(kCorrupt, decode_tree(bytes + '\0'));
  }
}

TEST_CASE("tree: changed bytes never crash, and what is accepted encodes to itself") {
  Random random(10);
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = draw_tree(&random, 4).bytes();
    for (uint64_t changes = 1 + random() % 3; changes != 0; --changes) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    const auto tree = decode_tree(bytes);
    if (tree.is_ok()) CHECK(written_anew(tree.value()) == bytes);
  }
}

TEST_CASE("tree: depth and counts of hostile bytes are bounded") {
  EXPECT_OK(decode_tree(nested_lists(kMaxTreeDepth)));
  EXPECT_CODE(kCorrupt, decode_tree(nested_lists(kMaxTreeDepth + 1)));
  EXPECT_CODE(kCorrupt, decode_tree(nested_lists(200000)));
  base::ByteWriter many;
  many.u8(static_cast<uint8_t>(Tree::Kind::kList));
  many.u32(0xFFFFFFFFu);
  EXPECT_CODE(kCorrupt, decode_tree(many.bytes()));
  // Nested lists may each claim the bytes that are left. The decoder allocates nothing because of a count.
  base::ByteWriter twice;
  twice.u8(static_cast<uint8_t>(Tree::Kind::kList));
  twice.u32(25);
  twice.u8(static_cast<uint8_t>(Tree::Kind::kList));
  twice.u32(20);
  twice.zeros(20);
  EXPECT_FAILURE(kCorrupt, "damaged at byte 30 of 30", decode_tree(twice.bytes()));
  base::ByteWriter odd;
  odd.u8(static_cast<uint8_t>(Tree::Kind::kDict));
  odd.u32(1);
  odd.u8(0);
  EXPECT_CODE(kCorrupt, decode_tree(odd.bytes()));
  EXPECT_CODE(kCorrupt, decode_tree("\x0a"));
}

}  // namespace
}  // namespace bytecheckpoint::format
