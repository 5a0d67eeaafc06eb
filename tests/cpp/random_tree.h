// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "csrc/format/tree.h"
#include "tests/cpp/random_box.h"

namespace bytecheckpoint::test {

/// A tree as Python could have it: what stands in the place of a key can be hashed.
inline format::Tree draw_tree(Random* random, int depth, bool as_key = false) {
  using Kind = format::Tree::Kind;
  format::Tree tree;
  tree.kind = static_cast<Kind>((*random)() % (depth == 0 ? 7 : 10));
  if (as_key && (tree.kind == Kind::kList || tree.kind == Kind::kDict)) tree.kind = Kind::kTuple;
  // Of all sizes: the shorter an int, the shorter what a pickle has for it.
  if (tree.kind == Kind::kInt) tree.integer = static_cast<int64_t>((*random)()) >> (*random)() % 64;
  if (tree.kind == Kind::kFloat) tree.real = static_cast<double>((*random)()) / 7 - 1e18;
  if (tree.kind == Kind::kString || tree.kind == Kind::kBytes) {
    const uint64_t limit = tree.kind == Kind::kString ? 128 : 256;
    for (uint64_t left = (*random)() % 6; left != 0; --left)
      tree.text.push_back(static_cast<char>((*random)() % limit));
  }
  if (tree.kind >= Kind::kList) {
    const bool is_dict = tree.kind == Kind::kDict;
    const uint64_t count = (*random)() % 4 * (is_dict ? 2 : 1);
    for (uint64_t i = 0; i < count; ++i) {
      tree.children.push_back(draw_tree(random, depth - 1, as_key || (is_dict && i % 2 == 0)));
    }
  }
  return tree;
}

}  // namespace bytecheckpoint::test
