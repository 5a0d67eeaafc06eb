// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/tree.h"

#include <cstring>

#include "csrc/base/utf8.h"

namespace bytecheckpoint::format {
namespace {

bool is_container(Tree::Kind kind) {
  return kind >= Tree::Kind::kList && kind <= Tree::Kind::kDict;
}

/// \param nodes_left  How many more nodes there can be. Counts are taken from it before anything is allocated: of lists
///   within lists each could else claim all bytes that are left.
bool decode_node(base::ByteReader* in, int depth, size_t* nodes_left, Tree* out) {
  const uint8_t tag = in->u8();
  if (!in->ok() || tag > static_cast<uint8_t>(Tree::Kind::kDict) || depth > kMaxTreeDepth) return false;
  out->kind = static_cast<Tree::Kind>(tag);
  if (out->kind == Tree::Kind::kInt) {
    out->integer = in->i64();
  } else if (out->kind == Tree::Kind::kFloat) {
    const uint64_t bits = in->u64();
    std::memcpy(&out->real, &bits, sizeof bits);
  } else if (out->kind == Tree::Kind::kString || out->kind == Tree::Kind::kBytes) {
    out->text = in->string();
    if (out->kind == Tree::Kind::kString && !base::is_utf8(out->text)) return false;
  } else if (is_container(out->kind)) {
    const uint32_t count = in->u32();
    if (count > *nodes_left || (out->kind == Tree::Kind::kDict && count % 2 != 0)) return false;
    *nodes_left -= count;
    out->children.reserve(count);
    for (uint32_t i = 0; i < count; ++i) {
      if (!decode_node(in, depth + 1, nodes_left, &out->children.emplace_back())) return false;
    }
  }
  return in->ok();
}

}  // namespace

bool Tree::operator==(const Tree& other) const {
  return kind == other.kind && integer == other.integer && std::memcmp(&real, &other.real, sizeof real) == 0 &&
         text == other.text && children == other.children;
}

void encode_text(Tree::Kind kind, std::string_view text, base::ByteWriter* out) {
  out->u8(static_cast<uint8_t>(kind));
  out->string(text);
}

void encode_container(Tree::Kind kind, size_t num_children, base::ByteWriter* out) {
  out->u8(static_cast<uint8_t>(kind));
  out->u32(static_cast<uint32_t>(num_children));
}

void encode_tree(const Tree& tree, base::ByteWriter* out) {
  if (tree.kind == Tree::Kind::kString || tree.kind == Tree::Kind::kBytes) {
    encode_text(tree.kind, tree.text, out);
    return;
  }
  if (is_container(tree.kind)) {
    encode_container(tree.kind, tree.children.size(), out);
    for (const Tree& child : tree.children) encode_tree(child, out);
    return;
  }
  out->u8(static_cast<uint8_t>(tree.kind));
  if (tree.kind == Tree::Kind::kInt) out->i64(tree.integer);
  if (tree.kind == Tree::Kind::kFloat) out->raw(&tree.real, sizeof tree.real);
}

base::Result<Tree> decode_tree(std::string_view bytes) {
  base::ByteReader in(bytes);
  Tree tree;
  size_t nodes_left = bytes.size();  // a node takes at least its tag
  if (!decode_node(&in, 0, &nodes_left, &tree) || in.remaining() != 0) {
    return base::Status::make(base::Code::kCorrupt, base::text("tree of builtin values: damaged at byte ",
                                                               in.position(), " of ", bytes.size()));
  }
  return tree;
}

}  // namespace bytecheckpoint::format
