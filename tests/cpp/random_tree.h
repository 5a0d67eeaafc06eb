// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "tests/cpp/make_tree.h"
#include "tests/cpp/random_box.h"

namespace bytecheckpoint::test {

/// A tree that Python could have: a key is always hashable.
inline Tree draw_tree(Random* random, int depth, bool as_key = false) {
  using Kind = Tree::Kind;
  auto kind = static_cast<Kind>((*random)() % (depth == 0 ? 7 : 10));
  if (as_key && (kind == Kind::kList || kind == Kind::kDict)) kind = Kind::kTuple;
  // Ints have all sizes, because pickle has shorter opcodes for shorter ints.
  if (kind == Kind::kInt) return integer(static_cast<int64_t>((*random)()) >> (*random)() % 64);
  if (kind == Kind::kFloat) return real(static_cast<double>((*random)()) / 7 - 1e18);
  if (kind == Kind::kString || kind == Kind::kBytes) {
    const uint64_t limit = kind == Kind::kString ? 128 : 256;
    std::string text;
    for (uint64_t left = (*random)() % 6; left != 0; --left) text.push_back(static_cast<char>((*random)() % limit));
    return string(text, kind);
  }
  if (kind < Kind::kInt) return leaf(kind);
  const bool is_dict = kind == Kind::kDict;
  const uint64_t count = (*random)() % 4 * (is_dict ? 2 : 1);
  std::vector<Tree> children;
  for (uint64_t i = 0; i < count; ++i) {
    children.push_back(draw_tree(random, depth - 1, as_key || (is_dict && i % 2 == 0)));
  }
  return holding(kind, children);
}

}  // namespace bytecheckpoint::test
