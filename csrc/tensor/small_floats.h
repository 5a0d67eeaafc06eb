// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::tensor {

/// Whether elements of `dtype` are codes with a table of values: floats of 8 bits, and pairs of floats of 4 bits.
bool is_small_float(DType dtype);

/// Returns the value of each code of a small float: 256 values, or 16 for kFloat4E2M1FNX2. Every value is exact.
/// \param dtype  One for which `is_small_float` is true.
const float* values_of_codes(DType dtype);

/// Whether `scale_at` knows elements of this dtype: float32, bfloat16, float16, float8_e8m0fnu and uint8.
bool is_scale_dtype(DType dtype);

/// Returns element `index` of `scales` as a float, exactly. An element of uint8 is the exponent plus 127 of a power of
/// two, as Hugging Face reads the scales of MXFP4 and MXFP8: 255 is infinity there, but NaN as float8_e8m0fnu.
float scale_at(DType dtype, const uint8_t* scales, int64_t index);

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// Rounds to the nearest bfloat16, ties to even. NaN becomes 0x7FC0, as in torch. Written so that compilers vectorize
/// loops of it.
inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

/// Rounds to the nearest float16, ties to even. What is too large becomes infinity.
inline uint16_t to_float16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  // Adding this number shifts the bits of a subnormal float16 to the end, and the processor rounds.
  constexpr uint32_t kMagic = ((127 - 15) + (23 - 10) + 1) << 23;
  const uint32_t subnormal = bits_of(float_of_bits(magnitude) + float_of_bits(kMagic)) - kMagic;
  const uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t special = magnitude > 0x7F800000 ? 0x7E00 : 0x7C00;
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  return static_cast<uint16_t>((magnitude >= (143u << 23) ? special : finite) | (bits >> 31 << 15));
}

}  // namespace bytecheckpoint::tensor
