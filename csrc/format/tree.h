// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/base/status.h"

namespace bytecheckpoint::format {

/// A value made of Python's builtin types, held as its bytes on disk: nobody changes one or looks for a part of it, and
/// no other representation takes as little for values that take a byte each.
///
/// A value is its kind (u8), then: int i64; float as 8 bytes; text u32 length and bytes; containers u32 count and
/// children.
class Tree {
 public:
  /// On disk: never renumber.
  enum class Kind : uint8_t {
    kNone = 0,
    kFalse = 1,
    kTrue = 2,
    kInt = 3,     // int64
    kFloat = 4,   // binary64
    kString = 5,  // UTF-8
    kBytes = 6,
    kList = 7,
    kTuple = 8,
    kDict = 9,  // children alternate: key, value
  };

  /// None
  Tree() : bytes_(1, '\0') {}

  /// Of what the functions below wrote: one value, no deeper than kMaxTreeDepth.
  static Tree from_encoded(std::string bytes) {
    Tree tree;
    tree.bytes_ = std::move(bytes);
    return tree;
  }

  const std::string& bytes() const { return bytes_; }
  Kind kind() const { return static_cast<Kind>(bytes_[0]); }

  /// Tells zeros of different sign apart, and not NaNs of the same bits.
  bool operator==(const Tree& other) const { return bytes_ == other.bytes_; }

 private:
  std::string bytes_;
};

/// Deepest nesting that is written or read; bounds the recursion over hostile bytes.
inline constexpr int kMaxTreeDepth = 100;

// Written one after the other, a container before its children: a Tree, once they are complete.

/// kNone, kFalse, kTrue.
void encode_constant(Tree::Kind kind, base::ByteWriter* out);
void encode_int(int64_t value, base::ByteWriter* out);
void encode_float(double value, base::ByteWriter* out);
/// \param text  Less than 4 GiB.
void encode_text(Tree::Kind kind, std::string_view text, base::ByteWriter* out);
/// To be followed by its children; of a dict keys and values in turn.
void encode_container(Tree::Kind kind, size_t num_children, base::ByteWriter* out);

/// What they write.
inline constexpr size_t kConstantBytes = 1, kNumberBytes = 9, kTextHeadBytes = 5, kContainerBytes = 5;

/// kCorrupt on an unknown kind, text that is not UTF-8, a cut or too deep tree.
base::Result<Tree> decode_tree(std::string_view bytes);

/// One value of a tree. Children of a container are the values that follow.
struct TreeNode {
  Tree::Kind kind = Tree::Kind::kNone;
  int64_t integer = 0;
  double real = 0;
  std::string_view text;      // kString, kBytes; part of the tree
  uint32_t num_children = 0;  // of a dict keys and values
};

/// Reads the values of a tree, each before its children.
class TreeReader {
 public:
  /// \param tree  Must outlive the reader and the texts that it hands out.
  explicit TreeReader(const Tree& tree) : in_(tree.bytes()) {}

  TreeNode next();
  /// The next value with all that is in it.
  void skip();
  /// Of the tree's bytes.
  size_t position() const { return in_.position(); }

 private:
  base::ByteReader in_;
};

}  // namespace bytecheckpoint::format
