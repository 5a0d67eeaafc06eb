// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::staging {

/// Whether codes can be turned into values of this dtype: float32, bfloat16 and float16.
bool is_value_dtype(tensor::DType dtype);

/// What a quantized tensor is made of.
struct CodeKind {
  tensor::DType codes = tensor::DType::kNone;   // a small float; a byte of kFloat4E2M1FNX2 has two, the low bits first
  tensor::DType scales = tensor::DType::kNone;  // one that `tensor::scale_at` knows
  tensor::DType values = tensor::DType::kNone;  // float32, bfloat16 or float16

  int64_t codes_per_byte() const { return codes == tensor::DType::kFloat4E2M1FNX2 ? 2 : 1; }
  bool operator==(const CodeKind& other) const {
    return codes == other.codes && scales == other.scales && values == other.values;
  }
};

/// Turns codes into values: value = code * scale, both as float32, rounded to the nearest value of the dtype, ties to
/// even. That is what Hugging Face's `Fp8Dequantize` and `convert_moe_packed_tensors` compute, to the bit; only which
/// NaN comes out is not said, there or here.
///
/// The values that all bytes have with one scale are computed once and kept, for a number of scales, since most scales
/// belong to many codes. Not thread-safe.
class ValueTables {
 public:
  /// Codes that are neighbours, or evenly spaced, and have one scale.
  struct Run {
    const uint8_t* bytes;
    int64_t first;  // number of the first code
    int64_t step;   // from a code to the next one
    int64_t count;
  };

  /// Begins to turn codes of this kind into values. \param codes_per_scale  How many codes have one scale.
  void use(const CodeKind& kind, int64_t codes_per_scale);
  /// Writes the values of codes, `memory_step` bytes from one to the next.
  /// \param scale  Number of the scale in `scales`.
  void decode(const Run& run, const uint8_t* scales, int64_t scale, uint8_t* to, int64_t memory_step);

 private:
  static constexpr size_t kSlots = 128;
  /// Writes values of `Run` from a table, or without one.
  using Copy = void (*)(const Run& run, const uint8_t* table, uint8_t* to, int64_t memory_step);
  using Compute = void (*)(const Run& run, const float* codes, float scale, uint8_t* to, int64_t memory_step);

  template <class To, int kCodesPerByte>
  void take_functions();
  const uint8_t* table_of(float scale);

  CodeKind kind_;
  bool keeps_ = false;             // whether tables are worth making
  std::array<float, 256> codes_;   // values of the codes
  std::array<float, 256> powers_;  // scales of uint8
  int64_t table_bytes_ = 0;
  std::vector<uint8_t> tables_;                // kSlots of them
  std::array<uint32_t, kSlots> scale_bits_{};  // of each table
  std::array<bool, kSlots> is_made_{};
  Copy copy_ = nullptr;
  Compute compute_ = nullptr;
};

}  // namespace bytecheckpoint::staging
