// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/bytes.h"

namespace bytecheckpoint::base {

std::string crc_text(uint32_t crc) {
  const uint8_t bytes[] = {static_cast<uint8_t>(crc >> 24), static_cast<uint8_t>(crc >> 16),
                           static_cast<uint8_t>(crc >> 8), static_cast<uint8_t>(crc)};
  return to_hex(bytes, sizeof bytes);
}

std::string to_hex(const uint8_t* bytes, size_t size) {
  static const char kDigits[] = "0123456789abcdef";
  std::string out;
  out.reserve(2 * size);
  for (size_t i = 0; i < size; ++i) {
    out.push_back(kDigits[bytes[i] >> 4]);
    out.push_back(kDigits[bytes[i] & 15]);
  }
  return out;
}

bool id_from_hex(std::string_view digits, Id* id) {
  if (digits.size() != 2 * id->size()) return false;
  Id value{};
  for (size_t i = 0; i < digits.size(); ++i) {
    const char c = digits[i];
    uint8_t nibble;
    if (c >= '0' && c <= '9') {
      nibble = static_cast<uint8_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      nibble = static_cast<uint8_t>(c - 'a' + 10);
    } else {
      return false;
    }
    value[i / 2] = static_cast<uint8_t>(value[i / 2] << 4 | nibble);
  }
  *id = value;
  return true;
}

}  // namespace bytecheckpoint::base
