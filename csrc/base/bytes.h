// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace bytecheckpoint::base {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little-endian and copied as such");

/// 16 bytes that name a save or a data file.
using Id = std::array<uint8_t, 16>;

/// Returns `bytes` as lower-case hex digits, two per byte.
std::string to_hex(const uint8_t* bytes, size_t size);
/// Returns a CRC-32 as eight lower-case hex digits, as other tools print it.
std::string crc_text(uint32_t crc);
inline std::string to_hex(const Id& id) {
  return to_hex(id.data(), id.size());
}

/// Reads 32 lower-case hex digits. \returns false, and leaves `*id` alone, if `digits` is anything else.
bool id_from_hex(std::string_view digits, Id* id);

/// Adds two sizes or offsets. \returns false, and leaves `*sum` alone, if an operand is negative or the sum exceeds
/// int64.
inline bool checked_add(int64_t a, int64_t b, int64_t* sum) {
  int64_t result;
  if (a < 0 || b < 0 || __builtin_add_overflow(a, b, &result)) return false;
  *sum = result;
  return true;
}

/// Multiplies two sizes. \returns false, and leaves `*product` alone, if an operand is negative or the product exceeds
/// int64.
inline bool checked_mul(int64_t a, int64_t b, int64_t* product) {
  int64_t result;
  if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &result)) return false;
  *product = result;
  return true;
}

/// Rounds `value` up to a multiple of `alignment`, a power of two. `value` is a file position, far below the limit of
/// int64.
inline int64_t align_up(int64_t value, int64_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}
/// Rounds `value` down to a multiple of `alignment`, a power of two.
inline int64_t align_down(int64_t value, int64_t alignment) {
  return value & ~(alignment - 1);
}

/// Appends fixed-width little-endian fields to a growing buffer.
class ByteWriter {
 public:
  ByteWriter() = default;
  /// Continues behind `bytes`.
  explicit ByteWriter(std::string bytes) : out_(std::move(bytes)) {}

  void reserve(size_t bytes) { out_.reserve(bytes); }
  void u8(uint8_t value) { out_.push_back(static_cast<char>(value)); }
  void u16(uint16_t value) { raw(&value, sizeof value); }
  void u32(uint32_t value) { raw(&value, sizeof value); }
  void u64(uint64_t value) { raw(&value, sizeof value); }
  void i64(int64_t value) { raw(&value, sizeof value); }
  void raw(const void* bytes, size_t size) { out_.append(static_cast<const char*>(bytes), size); }
  void raw(std::string_view bytes) { out_.append(bytes); }
  void id(const Id& id) { raw(id.data(), id.size()); }
  /// Appends the length (u32), then the bytes. `value` is shorter than 4 GiB.
  void string(std::string_view value) {
    u32(static_cast<uint32_t>(value.size()));
    raw(value);
  }
  void zeros(size_t count) { out_.append(count, '\0'); }
  /// Appends zero bytes up to the next multiple of `alignment`, counted from the start of the buffer.
  void align(size_t alignment) { zeros((alignment - out_.size() % alignment) % alignment); }
  /// Overwrite a field that was appended before, such as a CRC; all its bytes lie inside the buffer.
  void put_u32(size_t position, uint32_t value) { std::memcpy(&out_[position], &value, sizeof value); }
  void put_u64(size_t position, uint64_t value) { std::memcpy(&out_[position], &value, sizeof value); }

  /// Removes all bytes behind the first `size`.
  void truncate(size_t size) { out_.resize(size); }

  size_t size() const { return out_.size(); }
  const std::string& bytes() const { return out_; }
  /// Returns the buffer; the writer must not be used afterwards.
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

/// Reads fixed-width little-endian fields from bytes that may be damaged or hostile.
///
/// A read past the end returns zeros and makes `ok()` false for good. So a decoder reads all fields of a struct first
/// and checks `ok()` once. A length field never causes an allocation by itself: `string` and `view` first check that so
/// many bytes are left.
class ByteReader {
 public:
  /// \param bytes  Must outlive the reader and the views that it returns.
  explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}

  uint8_t u8() { return number<uint8_t>(); }
  uint16_t u16() { return number<uint16_t>(); }
  uint32_t u32() { return number<uint32_t>(); }
  uint64_t u64() { return number<uint64_t>(); }
  int64_t i64() { return number<int64_t>(); }
  Id id() {
    Id value{};
    const std::string_view bytes = view(value.size());
    if (bytes.size() == value.size()) std::memcpy(value.data(), bytes.data(), value.size());
    return value;
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
  /// Reads a length (u32) and as many bytes: what `ByteWriter::string` wrote.
  std::string string() { return std::string(view(u32())); }
  void skip(uint64_t size) { (void)view(size); }

  bool ok() const { return ok_; }
  /// Makes `ok()` false: for a decoder that finds an impossible value.
  void fail() { ok_ = false; }
  size_t position() const { return position_; }
  size_t remaining() const { return bytes_.size() - position_; }

 private:
  template <class Number>
  Number number() {
    Number value = 0;
    const std::string_view bytes = view(sizeof value);
    if (bytes.size() == sizeof value) std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }

  std::string_view bytes_;
  size_t position_ = 0;
  bool ok_ = true;
};

}  // namespace bytecheckpoint::base
