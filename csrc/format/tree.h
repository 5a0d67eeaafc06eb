// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/base/status.h"

namespace bytecheckpoint::format {

/// A value made of Python's builtin types, stored as its bytes on disk. Nobody changes a tree or looks for a part of
/// it, and no other representation is as compact for values that take one byte each.
///
/// Each value is its kind (u8), then for an int an i64, for a float 8 bytes, for text its length (u32) and bytes, for a
/// container the number of its children (u32) and the children. [1, "a"] is
///
///     7  2,0,0,0  3  1,0,0,0,0,0,0,0  5  1,0,0,0  'a'
///     list of 2   int 1               string of 1
class Tree {
 public:
  /// The kinds of values. The numbers are on disk: never change one.
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

  /// The tree of None.
  Tree() : bytes_(1, '\0') {}

  /// Makes a tree of bytes that the functions below wrote. They must be one complete value, no deeper than
  /// kMaxTreeDepth.
  static Tree from_encoded(std::string bytes) {
    Tree tree;
    tree.bytes_ = std::move(bytes);
    return tree;
  }

  const std::string& bytes() const { return bytes_; }
  Kind kind() const { return static_cast<Kind>(bytes_[0]); }

  /// Compares the bytes. So 0.0 and -0.0 differ, and NaNs of the same bits are equal.
  bool operator==(const Tree& other) const { return bytes_ == other.bytes_; }

 private:
  std::string bytes_;
};

/// Deepest nesting that is written or read. It bounds the recursion over hostile bytes.
inline constexpr int kMaxTreeDepth = 100;

// The functions below append one value each, a container before its children. The result is a Tree once it is complete.

/// \param kind  kNone, kFalse or kTrue.
void encode_constant(Tree::Kind kind, base::ByteWriter* out);
void encode_int(int64_t value, base::ByteWriter* out);
void encode_float(double value, base::ByteWriter* out);
/// \param kind  kString, whose text must be UTF-8, or kBytes.
/// \param text  Less than 4 GiB.
void encode_text(Tree::Kind kind, std::string_view text, base::ByteWriter* out);
/// Appends the head of a container; the caller appends the children next. For a dict they are keys and values in turn,
/// and `num_children` counts both.
void encode_container(Tree::Kind kind, size_t num_children, base::ByteWriter* out);

/// How many bytes these functions write; for a text without its content, for a container without its children.
inline constexpr size_t kConstantBytes = 1, kNumberBytes = 9, kTextHeadBytes = 5, kContainerBytes = 5;

/// Checks bytes that may be damaged or hostile, and copies them. \returns kCorrupt for an unknown kind, text that is
/// not UTF-8, and a tree that is cut off or too deep.
base::Result<Tree> decode_tree(std::string_view bytes);

/// One value of a tree. The children of a container are the values that follow it.
struct TreeNode {
  Tree::Kind kind = Tree::Kind::kNone;
  int64_t integer = 0;
  double real = 0;
  std::string_view text;      // of kString and kBytes; a part of the tree's bytes
  uint32_t num_children = 0;  // of a dict: keys and values together
};

/// Reads the values of a tree, each one before its children. Must not read behind the end: callers count the children.
class TreeReader {
 public:
  /// \param tree  Must outlive the reader and the texts that it returns.
  explicit TreeReader(const Tree& tree) : in_(tree.bytes()) {}

  TreeNode next();
  /// Skips the next value and all that is in it.
  void skip();
  /// Returns the offset of the next value in the tree's bytes.
  size_t position() const { return in_.position(); }

 private:
  base::ByteReader in_;
};

}  // namespace bytecheckpoint::format
