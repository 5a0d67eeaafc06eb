// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "csrc/base/bytes.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::test {

struct FreeBytes {
  void operator()(uint8_t* bytes) const { std::free(bytes); }
};
using AlignedBytes = std::unique_ptr<uint8_t[], FreeBytes>;

/// Zeroed memory that is aligned for direct I/O.
inline AlignedBytes aligned_bytes(int64_t size) {
  const auto rounded = static_cast<size_t>(base::align_up(size + 1, io::kDirectAlignment));
  AlignedBytes bytes(static_cast<uint8_t*>(std::aligned_alloc(io::kDirectAlignment, rounded)));
  std::memset(bytes.get(), 0, rounded);
  return bytes;
}

inline AlignedBytes aligned_bytes(const std::string& content) {
  AlignedBytes bytes = aligned_bytes(static_cast<int64_t>(content.size()));
  std::memcpy(bytes.get(), content.data(), content.size());
  return bytes;
}

/// Pseudo-random bytes, which differ from their neighbours at every distance that matters.
inline std::string patterned(int64_t size, uint32_t seed = 1) {
  std::string bytes(static_cast<size_t>(size), '\0');
  for (char& byte : bytes) {
    seed = seed * 1664525u + 1013904223u;
    byte = static_cast<char>(seed >> 24);
  }
  return bytes;
}

}  // namespace bytecheckpoint::test
