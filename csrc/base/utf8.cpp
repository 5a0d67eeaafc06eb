// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/utf8.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace bytecheckpoint::base {
namespace {

/// Returns the number of bytes of the character that begins at `at`; 0 if there is no valid character.
size_t character_bytes(std::string_view text, size_t at) {
  const auto byte = [&](size_t index) { return static_cast<uint8_t>(text[index]); };
  const uint8_t lead = byte(at);
  if (lead < 0x80) return 1;
  // Only the range of the second byte depends on the first: it excludes overlong forms, surrogates and what lies beyond
  // U+10FFFF.
  size_t bytes = 0;
  uint8_t low = 0x80, high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    bytes = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    bytes = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    bytes = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  }
  if (bytes == 0 || bytes > text.size() - at || byte(at + 1) < low || byte(at + 1) > high) return 0;
  for (size_t i = 2; i < bytes; ++i) {
    if ((byte(at + i) & 0xC0) != 0x80) return 0;
  }
  return bytes;
}

}  // namespace

bool is_utf8(std::string_view text) {
  constexpr uint64_t kHighBits = 0x8080808080808080u;
  for (size_t at = 0; at < text.size();) {
    uint64_t eight;
    if (text.size() - at >= sizeof eight) {
      std::memcpy(&eight, text.data() + at, sizeof eight);
      if ((eight & kHighBits) == 0) {
        at += sizeof eight;
        continue;
      }
    }
    const size_t bytes = character_bytes(text, at);
    if (bytes == 0) return false;
    at += bytes;
  }
  return true;
}

std::string latin1_to_utf8(std::string_view bytes) {
  std::string utf8;
  utf8.reserve(bytes.size());
  for (const char c : bytes) {
    const auto byte = static_cast<uint8_t>(c);
    if (byte < 0x80) {
      utf8.push_back(c);
    } else {
      utf8.push_back(static_cast<char>(0xC0 | byte >> 6));
      utf8.push_back(static_cast<char>(0x80 | (byte & 0x3F)));
    }
  }
  return utf8;
}

bool utf8_to_latin1(std::string_view utf8, std::string* bytes) {
  bytes->clear();
  bytes->reserve(utf8.size());
  for (size_t at = 0; at < utf8.size(); ++at) {
    const auto lead = static_cast<uint8_t>(utf8[at]);
    if (lead < 0x80) {
      bytes->push_back(utf8[at]);
    } else if (lead <= 0xC3 && at + 1 < utf8.size()) {
      bytes->push_back(static_cast<char>(lead << 6 | (utf8[++at] & 0x3F)));
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace bytecheckpoint::base
