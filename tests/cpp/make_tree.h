// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "csrc/format/tree.h"

/// Makes trees from their parts, and takes trees apart.
namespace bytecheckpoint::test {

using format::Tree;

/// None, False, True.
inline Tree leaf(Tree::Kind kind) {
  base::ByteWriter out;
  format::encode_constant(kind, &out);
  return Tree::from_encoded(out.take());
}
inline Tree integer(int64_t value) {
  base::ByteWriter out;
  format::encode_int(value, &out);
  return Tree::from_encoded(out.take());
}
inline Tree real(double value) {
  base::ByteWriter out;
  format::encode_float(value, &out);
  return Tree::from_encoded(out.take());
}
inline Tree string(std::string_view value, Tree::Kind kind = Tree::Kind::kString) {
  base::ByteWriter out;
  format::encode_text(kind, value, &out);
  return Tree::from_encoded(out.take());
}
inline Tree holding(Tree::Kind kind, const std::vector<Tree>& children) {
  base::ByteWriter out;
  format::encode_container(kind, children.size(), &out);
  for (const Tree& child : children) out.raw(child.bytes());
  return Tree::from_encoded(out.take());
}

/// The outermost value. Its text points into the tree.
inline format::TreeNode root_of(const Tree& tree) {
  return format::TreeReader(tree).next();
}
inline std::vector<Tree> children_of(const Tree& tree) {
  // Each child ends where the next one begins.
  std::vector<Tree> children;
  std::string_view left = std::string_view(tree.bytes()).substr(format::kContainerBytes);
  for (uint32_t i = root_of(tree).num_children; i != 0; --i) {
    const Tree rest = Tree::from_encoded(std::string(left));
    format::TreeReader in(rest);
    in.skip();
    children.push_back(Tree::from_encoded(std::string(left.substr(0, in.position()))));
    left.remove_prefix(in.position());
  }
  return children;
}

/// Writes the same tree again from its values, one by one.
inline void write_anew(format::TreeReader* in, base::ByteWriter* out) {
  const format::TreeNode node = in->next();
  switch (node.kind) {
    case Tree::Kind::kNone:
    case Tree::Kind::kFalse:
    case Tree::Kind::kTrue:
      return format::encode_constant(node.kind, out);
    case Tree::Kind::kInt:
      return format::encode_int(node.integer, out);
    case Tree::Kind::kFloat:
      return format::encode_float(node.real, out);
    case Tree::Kind::kString:
    case Tree::Kind::kBytes:
      return format::encode_text(node.kind, node.text, out);
    default:
      format::encode_container(node.kind, node.num_children, out);
      for (uint32_t i = 0; i < node.num_children; ++i) write_anew(in, out);
  }
}
inline std::string written_anew(const Tree& tree) {
  base::ByteWriter out;
  format::TreeReader in(tree);
  write_anew(&in, &out);
  return out.take();
}

}  // namespace bytecheckpoint::test
