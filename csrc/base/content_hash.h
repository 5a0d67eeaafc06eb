// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"

namespace bytecheckpoint::base {

/// 128 bits that tell contents apart: equal contents have equal hashes, and no two others that ever occur do.
///
/// The hash of at most kHashedBytes is their XXH3-128. That of more is the XXH3-128 of the hashes of all stretches of
/// kHashedBytes, each 16 bytes, low half first: so threads can hash the stretches of one tensor.
struct ContentHash {
  uint64_t low = 0;
  uint64_t high = 0;

  bool operator==(const ContentHash& other) const { return low == other.low && high == other.high; }
  bool operator!=(const ContentHash& other) const { return !(*this == other); }
};

inline constexpr int64_t kHashedBytes = 1 << 20;

/// Loads XXH3 from a shared library that has it, for this process. No effect if one is loaded. Thread-safe.
/// \returns kUnsupported, with the reason.
Status load_content_hash(const std::string& library);
/// Whether a library is loaded. All that hashes needs one. Thread-safe.
bool has_content_hash();

/// Returns the hash of at most kHashedBytes.
ContentHash hash_stretch(const void* bytes, size_t size);
/// Returns the hash of contents that have these stretches.
ContentHash join_stretches(const ContentHash* first, size_t count);

/// Hashes contents that come piece by piece. Not thread-safe.
class ContentHasher {
 public:
  ContentHasher();
  ~ContentHasher();
  ContentHasher(const ContentHasher&) = delete;
  ContentHasher& operator=(const ContentHasher&) = delete;

  void add(const void* bytes, size_t size);
  /// Returns the hash of all that was added, and begins anew.
  ContentHash end();

 private:
  void end_stretch();

  void* state_;
  int64_t in_stretch_ = 0;
  std::vector<ContentHash> stretches_;
};

/// The bytes of a hash in a file, and back.
inline constexpr size_t kEncodedHashBytes = 16;
void encode_hash(const ContentHash& hash, std::string* out);
ContentHash decode_hash(std::string_view bytes);

}  // namespace bytecheckpoint::base
