// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/bytes.h"
#include "csrc/base/status.h"

namespace bytecheckpoint::format {

/// A value made of Python's builtin types. Kinds are on disk: never renumber.
struct Tree {
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

  Kind kind = Kind::kNone;
  int64_t integer = 0;
  double real = 0;
  std::string text;  // kString, kBytes
  std::vector<Tree> children;

  bool operator==(const Tree& other) const;
};

/// Deepest nesting that is written or read; bounds the recursion over hostile bytes.
inline constexpr int kMaxTreeDepth = 100;

/// Tag (u8), then: int i64; float as 8 bytes; text u32 length and bytes; containers u32 count and children.
/// The caller has checked the depth.
void encode_tree(const Tree& tree, base::ByteWriter* out);

/// The same of a value that is no Tree yet; of a container, followed by its children.
void encode_text(Tree::Kind kind, std::string_view text, base::ByteWriter* out);
void encode_container(Tree::Kind kind, size_t num_children, base::ByteWriter* out);

/// kCorrupt on an unknown tag, a cut or too deep tree.
base::Result<Tree> decode_tree(std::string_view bytes);

}  // namespace bytecheckpoint::format
