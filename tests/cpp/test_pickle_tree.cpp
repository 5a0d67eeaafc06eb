// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle/pickle_tree.h"

#include <string>

#include "tests/cpp/expect.h"
#include "tests/cpp/make_tree.h"
#include "tests/cpp/pickle_parts.h"
#include "tests/cpp/pickle_rules.h"

namespace bytecheckpoint::format {
namespace {

using namespace test::pickled;  // NOLINT
using test::kRules;
using test::read;
using test::tree_of;

TEST_CASE("pickle_tree: sharing that would unfold beyond measure is corrupt") {
  // Thirty lists in a tuple. Each holds the previous one ten times.
  std::string laughs = "(]" + put(0);
  for (uint32_t level = 1; level < 30; ++level) laughs += "]" + put(level) + "(" + repeated(get(level - 1), 10) + "e";
  EXPECT_FAILURE(kCorrupt, "more values", tree_of(whole(laughs + "t")));
  const std::string long_text = text(std::string(1 << 20, 'x')) + put(0);
  EXPECT_OK(tree_of(whole("](" + long_text + repeated(get(0), 10) + "e")));
  EXPECT_FAILURE(kCorrupt, "more values", tree_of(whole("](" + long_text + repeated(get(0), 100000) + "e")));
}

TEST_CASE("pickle_tree: a small pickle may share some, not megabytes") {
  const auto shared = [](size_t times) {
    return whole(tuple({repeated("N", 100)}) + put(0) + "(" + repeated(get(0), times) + "t\x86");
  };
  EXPECT_OK(tree_of(shared(30)));
  EXPECT_FAILURE(kCorrupt, "more values", tree_of(shared(1000)));
}

TEST_CASE("pickle_tree: without sharing everything fits, down to one byte a value") {
  const std::string nones = whole("](" + repeated("N", 300000) + "e");
  CHECK(test::root_of(test::value_of(tree_of(nones))).num_children == 300000);
}

TEST_CASE("pickle_tree: depth is bounded, so also what holds itself") {
  const auto nested = [](size_t depth) { return whole("N" + repeated("\x85", depth)); };
  EXPECT_OK(tree_of(nested(kMaxTreeDepth)));
  EXPECT_FAILURE(kCorrupt, "deep", tree_of(nested(kMaxTreeDepth + 1)));
  EXPECT_FAILURE(kCorrupt, "deep", tree_of(nested(300000)));
  EXPECT_OK(read(nested(300000)));
  EXPECT_FAILURE(kCorrupt, "or holds itself", tree_of(whole("]q\1h\1a")));
  EXPECT_FAILURE(kCorrupt, "or holds itself", tree_of(whole("}q\1K\1h\1s")));
  EXPECT_OK(read(whole(global("m", "C") + ")\x81q\1h\1b")));
}

TEST_CASE("pickle_tree: objects are no builtin values, and keys can be hashed") {
  EXPECT_CODE(kUnsupported, tree_of(whole(global("m", "C"))));
  EXPECT_CODE(kUnsupported, tree_of(whole(list({call(global("m", "f"), ")")}))));
  EXPECT_CODE(kUnsupported, tree_of(whole("}" + object(global("m", "C"), "}") + "Ns")));
  EXPECT_FAILURE(kCorrupt, "a key holds a list or dict", tree_of(whole("}]\x85Ns")));
  EXPECT_FAILURE(kCorrupt, "a key holds a list or dict", tree_of(whole("}}\x85\x85Ns")));
  EXPECT_OK(tree_of(whole("}(K\1N\x86]u")));
}

TEST_CASE("pickle_tree: lists and dicts that stand in two places are copied, unless the rules refuse it") {
  const auto unfold = [](const std::string& value, const UnfoldRules& rules) -> base::Result<Tree> {
    const std::string bytes = whole(value);
    BCP_ASSIGN_OR_RETURN(const Pickle pickle, read(bytes));
    UnfoldBudget budget(pickle);
    return unfold_tree(pickle, pickle.root(), &budget, rules);
  };
  for (const char* shared : {"](]q\1h\1e", "](}q\1h\1e", "](]\x85q\1h\1e"}) {
    EXPECT_OK(unfold(shared, {}));
    EXPECT_FAILURE(kUnsupported, "two places", unfold(shared, {true, {}}));
  }
  EXPECT_OK(unfold("](K\1\x85q\1h\1e", {true, {}}));
  EXPECT_OK(unfold("](]]e", {true, {}}));
  // An empty tuple made from a mark is not a container of its own, and does not count as a list in two places.
  EXPECT_OK(unfold("(t", {true, {}}));
  EXPECT_OK(unfold("((t]Nat", {true, {}}));
}

TEST_CASE("pickle_tree: bytes of protocol 2, if the rules name their function") {
  const std::string bytes = whole(call(global("m", "f"), tuple({text("\xC3\xBF"), text("latin1")})));
  const Pickle pickle = test::value_of(read(bytes));
  const auto unfold = [&](const UnfoldRules& rules) {
    UnfoldBudget budget(pickle);
    return unfold_tree(pickle, pickle.root(), &budget, rules);
  };
  EXPECT_CODE(kUnsupported, unfold({}));
  EXPECT_CODE(kUnsupported, unfold({false, 1}));
  CHECK(test::value_of(unfold({false, 2})) == test::string("\xFF", Tree::Kind::kBytes));
}

}  // namespace
}  // namespace bytecheckpoint::format
