// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/tree.h"

#include <cstring>

#include "csrc/base/utf8.h"

namespace bytecheckpoint::format {
namespace {

bool is_container(Tree::Kind kind) {
  return kind >= Tree::Kind::kList && kind <= Tree::Kind::kDict;
}

/// Reads one value. Bytes that are cut off read as zeros; `in->ok()` says whether any were.
TreeNode read_node(base::ByteReader* in) {
  TreeNode node;
  node.kind = static_cast<Tree::Kind>(in->u8());
  if (node.kind == Tree::Kind::kInt) {
    node.integer = in->i64();
  } else if (node.kind == Tree::Kind::kFloat) {
    const uint64_t bits = in->u64();
    std::memcpy(&node.real, &bits, sizeof bits);
  } else if (node.kind == Tree::Kind::kString || node.kind == Tree::Kind::kBytes) {
    node.text = in->view(in->u32());
  } else if (is_container(node.kind)) {
    node.num_children = in->u32();
  }
  return node;
}

bool check_value(base::ByteReader* in, int depth) {
  const TreeNode node = read_node(in);
  if (!in->ok() || node.kind > Tree::Kind::kDict || depth > kMaxTreeDepth) return false;
  if (node.kind == Tree::Kind::kString && !base::is_utf8(node.text)) return false;
  if (node.kind == Tree::Kind::kDict && node.num_children % 2 != 0) return false;
  for (uint32_t i = 0; i < node.num_children; ++i) {
    if (!check_value(in, depth + 1)) return false;
  }
  return true;
}

void encode_kind(Tree::Kind kind, base::ByteWriter* out) {
  out->u8(static_cast<uint8_t>(kind));
}

}  // namespace

void encode_constant(Tree::Kind kind, base::ByteWriter* out) {
  encode_kind(kind, out);
}

void encode_int(int64_t value, base::ByteWriter* out) {
  encode_kind(Tree::Kind::kInt, out);
  out->i64(value);
}

void encode_float(double value, base::ByteWriter* out) {
  encode_kind(Tree::Kind::kFloat, out);
  out->raw(&value, sizeof value);
}

void encode_text(Tree::Kind kind, std::string_view text, base::ByteWriter* out) {
  encode_kind(kind, out);
  out->string(text);
}

void encode_container(Tree::Kind kind, size_t num_children, base::ByteWriter* out) {
  encode_kind(kind, out);
  out->u32(static_cast<uint32_t>(num_children));
}

base::Result<Tree> decode_tree(std::string_view bytes) {
  base::ByteReader in(bytes);
  if (check_value(&in, 0) && in.remaining() == 0) return Tree::from_encoded(std::string(bytes));
  return base::Status::make(base::Code::kCorrupt, base::text("tree of builtin values: damaged at byte ", in.position(),
                                                             " of ", bytes.size()));
}

TreeNode TreeReader::next() {
  return read_node(&in_);
}

void TreeReader::skip() {
  for (uint64_t left = 1; left != 0; --left) left += next().num_children;
}

}  // namespace bytecheckpoint::format
