// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/value_tables.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "csrc/tensor/small_floats.h"

namespace bytecheckpoint::staging {
namespace {

using tensor::DType;

/// Values that are computed at a time, in memory that stays in the cache.
constexpr int64_t kBatch = 256;
/// A table is made for scales that belong to at least so many codes, or that have few values.
constexpr int64_t kFewestCodesOfTable = 1024;

struct ToFloat32 {
  using Value = float;
  static Value of(float value) { return value; }
};
struct ToBFloat16 {
  using Value = uint16_t;
  static Value of(float value) { return tensor::to_bfloat16(value); }
};
struct ToFloat16 {
  using Value = uint16_t;
  static Value of(float value) { return tensor::to_float16(value); }
};

int code_at(const uint8_t* bytes, int64_t number) {
  return (bytes[number >> 1] >> ((number & 1) * 4)) & 0xF;
}

template <class To, int kCodesPerByte>
void compute(const ValueTables::Run& run, const float* codes, float scale, uint8_t* to, int64_t memory_step) {
  using Value = typename To::Value;
  float of_codes[kBatch];
  Value values[kBatch];
  for (int64_t begin = 0; begin < run.count; begin += kBatch) {
    const int64_t n = std::min(run.count - begin, kBatch), first = run.first + begin * run.step;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t number = first + i * run.step;
      of_codes[i] = codes[kCodesPerByte == 1 ? run.bytes[number] : code_at(run.bytes, number)];
    }
    for (int64_t i = 0; i < n; ++i) values[i] = To::of(of_codes[i] * scale);
    for (int64_t i = 0; i < n; ++i) std::memcpy(to + (begin + i) * memory_step, &values[i], sizeof(Value));
  }
}

/// Copies elements of kBytes from a table.
template <int64_t kBytes>
void copy_bytes(const ValueTables::Run& run, const uint8_t* table, uint8_t* to, int64_t memory_step) {
  const uint8_t* from = run.bytes + run.first;
  if (run.step == 1 && memory_step == kBytes) {
    for (int64_t i = 0; i < run.count; ++i) std::memcpy(to + i * kBytes, table + from[i] * kBytes, kBytes);
    return;
  }
  for (int64_t i = 0; i < run.count; ++i) {
    std::memcpy(to + i * memory_step, table + from[i * run.step] * kBytes, kBytes);
  }
}

/// The same for two codes in a byte: the table has the values of both.
template <int64_t kBytes>
void copy_pairs(const ValueTables::Run& run, const uint8_t* table, uint8_t* to, int64_t memory_step) {
  const auto copy_one = [&](int64_t i) {
    const int64_t number = run.first + i * run.step;
    std::memcpy(to + i * memory_step, table + (int64_t{run.bytes[number >> 1]} * 2 + (number & 1)) * kBytes, kBytes);
  };
  int64_t i = 0;
  if (run.step == 1 && memory_step == kBytes) {
    if (run.first % 2 != 0) copy_one(i++);  // the second one of a pair
    const uint8_t* from = run.bytes + (run.first + i) / 2;
    uint8_t* into = to + i * kBytes;
    const int64_t num_pairs = (run.count - i) / 2;
    for (int64_t p = 0; p < num_pairs; ++p) {
      std::memcpy(into + p * 2 * kBytes, table + int64_t{from[p]} * 2 * kBytes, static_cast<size_t>(2 * kBytes));
    }
    i += 2 * num_pairs;
  }
  for (; i < run.count; ++i) copy_one(i);
}

}  // namespace

bool is_value_dtype(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

template <class To, int kCodesPerByte>
void ValueTables::take_functions() {
  constexpr int64_t kBytes = sizeof(typename To::Value);
  table_bytes_ = int64_t{256} * kCodesPerByte * kBytes;
  copy_ = kCodesPerByte == 1 ? &copy_bytes<kBytes> : &copy_pairs<kBytes>;
  compute_ = &compute<To, kCodesPerByte>;
}

void ValueTables::use(const CodeKind& kind, int64_t codes_per_scale) {
  keeps_ = tensor::find_dtype(kind.scales)->itemsize_bytes == 1 || codes_per_scale >= kFewestCodesOfTable;
  if (kind == kind_) return;
  kind_ = kind;
  is_made_.fill(false);
  const bool is_packed = kind.codes_per_byte() == 2;
  const float* codes = tensor::values_of_codes(kind.codes);
  // The exponents of MXFP4 are exact, up to 2 ** 128, which is no float32: half of it is.
  const float half = is_packed && kind.scales == DType::kUInt8 ? 0.5f : 1.0f;
  for (size_t i = 0; i < 256; ++i) {
    codes_[i] = codes[is_packed ? i % 16 : i] / half;
    powers_[i] = static_cast<float>(std::ldexp(double{half}, static_cast<int>(i) - 127));
  }
  if (kind.values == DType::kFloat32) {
    is_packed ? take_functions<ToFloat32, 2>() : take_functions<ToFloat32, 1>();
  } else if (kind.values == DType::kBFloat16) {
    is_packed ? take_functions<ToBFloat16, 2>() : take_functions<ToBFloat16, 1>();
  } else {
    is_packed ? take_functions<ToFloat16, 2>() : take_functions<ToFloat16, 1>();
  }
  tables_.resize(static_cast<size_t>(table_bytes_) * kSlots);
}

void ValueTables::decode(const Run& run, const uint8_t* scales, int64_t scale, uint8_t* to, int64_t memory_step) {
  const float value =
      kind_.scales == DType::kUInt8 ? powers_[scales[scale]] : tensor::scale_at(kind_.scales, scales, scale);
  if (keeps_) return copy_(run, table_of(value), to, memory_step);
  compute_(run, codes_.data(), value, to, memory_step);
}

const uint8_t* ValueTables::table_of(float scale) {
  const uint32_t bits = tensor::bits_of(scale);
  const size_t slot = (bits * 2654435761u) >> 25;
  uint8_t* table = tables_.data() + slot * static_cast<size_t>(table_bytes_);
  if (is_made_[slot] && scale_bits_[slot] == bits) return table;
  is_made_[slot] = true;
  scale_bits_[slot] = bits;
  std::array<uint8_t, 256> all;
  std::iota(all.begin(), all.end(), uint8_t{0});
  const int64_t count = 256 * kind_.codes_per_byte();
  compute_({all.data(), 0, 1, count}, codes_.data(), scale, table, table_bytes_ / count);
  return table;
}

}  // namespace bytecheckpoint::staging
