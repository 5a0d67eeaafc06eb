// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

namespace bytecheckpoint::base {

/// Appends unsigned numbers as LEB128: seven bits per byte, lowest bits first; the top bit of a byte says that another
/// one follows.
///
/// Only for data that travels between processes of one build. On disk all fields have a fixed width.
class VarintWriter {
 public:
  void number(uint64_t value) {
    for (; value >= 0x80; value >>= 7) out_.push_back(static_cast<char>(value | 0x80));
    out_.push_back(static_cast<char>(value));
  }
  void u8(uint8_t value) { out_.push_back(static_cast<char>(value)); }
  void raw(std::string_view bytes) { out_.append(bytes); }

  size_t size() const { return out_.size(); }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

/// Reads what VarintWriter wrote, from bytes that may be damaged or hostile. Like `ByteReader`, it returns zeros behind
/// the end and then makes `ok()` false for good. A number has exactly one valid encoding: trailing zero groups and bits
/// beyond 64 are failures.
class VarintReader {
 public:
  /// \param bytes  Must outlive the reader and the views that it returns.
  explicit VarintReader(std::string_view bytes) : bytes_(bytes) {}

  uint64_t number() {
    if (position_ < bytes_.size() && static_cast<uint8_t>(bytes_[position_]) < 0x80) {
      return static_cast<uint8_t>(bytes_[position_++]);
    }
    return bytes_.size() - position_ > 2 ? short_number() : long_number();
  }
  /// Reads a size or an offset. Fails if it exceeds int64.
  int64_t i64() { return static_cast<int64_t>(at_most(std::numeric_limits<int64_t>::max())); }
  /// Reads a number. Fails if it exceeds 32 bits.
  uint32_t u32() { return static_cast<uint32_t>(at_most(std::numeric_limits<uint32_t>::max())); }
  /// Reads how many elements follow that take `least_bytes` or more each. Fails if the bytes that are left cannot hold
  /// so many, so that a caller may allocate memory for this number.
  size_t count(size_t least_bytes) {
    const size_t left = remaining();
    const uint64_t value = number();
    const bool fits = value <= left && value * least_bytes <= left;  // without a division, and without an overflow
    return static_cast<size_t>(fits ? value : failure());
  }
  uint8_t u8() {
    if (position_ == bytes_.size()) return static_cast<uint8_t>(failure());
    return static_cast<uint8_t>(bytes_[position_++]);
  }
  /// Returns the next `size` bytes without copying them; empty, and `ok()` becomes false, if fewer are left.
  std::string_view view(uint64_t size) {
    if (size > bytes_.size() - position_) {
      ok_ = false;
      return {};
    }
    const std::string_view result = bytes_.substr(position_, size);
    position_ += size;
    return result;
  }

  /// Passes over `bytes` if they come next. \returns false, and stays where it is, if others do.
  bool skip(std::string_view bytes) {
    if (bytes_.compare(position_, bytes.size(), bytes) != 0) return false;
    position_ += bytes.size();
    return true;
  }

  bool ok() const { return ok_; }
  void fail() { ok_ = false; }
  size_t position() const { return position_; }
  size_t remaining() const { return bytes_.size() - position_; }
  /// Returns what is not read yet.
  std::string_view rest() const { return bytes_.substr(position_); }

 private:
  uint64_t failure() {
    ok_ = false;
    return 0;
  }
  uint64_t at_most(uint64_t limit) {
    const uint64_t value = number();
    return value <= limit ? value : failure();
  }
  /// Does the same as long_number, faster, for numbers of two and three bytes. At least three bytes must be left.
  uint64_t short_number() {
    const auto byte = [this](size_t i) { return uint64_t{static_cast<uint8_t>(bytes_[position_ + i])}; };
    const uint64_t low = byte(0) & 0x7F;
    if (byte(1) < 0x80) {
      const uint64_t value = low | byte(1) << 7;
      position_ += 2;
      return value < 0x80 ? failure() : value;
    }
    if (byte(2) >= 0x80) return long_number();
    const uint64_t value = low | (byte(1) & 0x7F) << 7 | byte(2) << 14;
    position_ += 3;
    return value < 1 << 14 ? failure() : value;
  }
  uint64_t long_number() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64 && position_ < bytes_.size(); shift += 7) {
      const auto byte = static_cast<uint8_t>(bytes_[position_++]);
      const uint64_t bits = byte & 0x7F;
      if (shift == 63 && bits > 1) return failure();
      value |= bits << shift;
      if (byte < 0x80) return byte == 0 && shift != 0 ? failure() : value;
    }
    return failure();
  }

  std::string_view bytes_;
  size_t position_ = 0;
  bool ok_ = true;
};

}  // namespace bytecheckpoint::base
