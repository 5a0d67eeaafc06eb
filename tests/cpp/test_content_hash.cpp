// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/content_hash.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

namespace bytecheckpoint::base {
namespace {

std::string sample(size_t size) {
  std::string bytes(size, '\0');
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(i * 2654435761U >> 13);
  return bytes;
}

TEST_CASE("content_hash: a library without it is refused, and what is no library") {
  CHECK(load_content_hash("no_such_library.so").code() == Code::kUnsupported);
  CHECK(load_content_hash("libc.so.6").message().find("has no XXH3") != std::string::npos);
}

TEST_CASE("content_hash: the hash is that of XXH3, and of the stretches of what is longer") {
  REQUIRE(load_content_hash("libxxhash.so.0").is_ok());
  CHECK(load_content_hash("no_such_library.so").is_ok());  // one is loaded
  CHECK(has_content_hash());
  // `printf abc | xxh128sum` says 06b05ab6733a618578af5f94892f3950.
  CHECK(hash_stretch("abc", 3) == ContentHash{0x78af5f94892f3950, 0x06b05ab6733a6185});
  std::string encoded;
  encode_hash(hash_stretch("abc", 3), &encoded);
  CHECK(encoded.substr(0, 2) == "\x50\x39");
  CHECK(decode_hash(encoded) == hash_stretch("abc", 3));

  for (const size_t size : {size_t{0}, size_t{1}, size_t{1} << 20, (size_t{1} << 20) + 1, size_t{3} << 20}) {
    const std::string bytes = sample(size);
    std::vector<ContentHash> stretches;
    for (size_t at = 0; at < size; at += kHashedBytes) {
      stretches.push_back(hash_stretch(bytes.data() + at, std::min<size_t>(kHashedBytes, size - at)));
    }
    const ContentHash whole = join_stretches(stretches.data(), stretches.size());
    if (size <= kHashedBytes) CHECK(whole == hash_stretch(bytes.data(), size));
    ContentHasher hasher;
    for (const size_t step : {size_t{7777}, size_t{1} << 21}) {
      for (size_t at = 0; at < size; at += step) hasher.add(bytes.data() + at, std::min(step, size - at));
      CHECK(hasher.end() == whole);
    }
    if (size == 0) continue;
    std::string other = bytes;
    other.back() ^= 1;
    hasher.add(other.data(), other.size());
    CHECK(hasher.end() != whole);
  }
}

}  // namespace
}  // namespace bytecheckpoint::base
