// SPDX-License-Identifier: Apache-2.0
#include "csrc/tensor/small_floats.h"

#include <array>
#include <cmath>
#include <limits>

namespace bytecheckpoint::tensor {
namespace {

/// How the bits of a float with a sign are used.
struct FloatLayout {
  int exponent_bits, mantissa_bits, bias;
  enum class Special : uint8_t {
    kIeee,         // all bits of the exponent set: infinity or NaN
    kLastIsNan,    // all bits but the sign set: NaN
    kMinusZeroNan  // the code of minus zero is NaN
  } special;
};

float value_of_code(const FloatLayout& layout, uint32_t code) {
  const auto nan = std::numeric_limits<float>::quiet_NaN();
  const uint32_t sign = code >> (layout.exponent_bits + layout.mantissa_bits);
  const uint32_t most_exponent = (1u << layout.exponent_bits) - 1, most_mantissa = (1u << layout.mantissa_bits) - 1;
  const uint32_t exponent = (code >> layout.mantissa_bits) & most_exponent;
  const uint32_t mantissa = code & most_mantissa;
  const float signed_one = sign != 0 ? -1.0f : 1.0f;
  switch (layout.special) {
    case FloatLayout::Special::kIeee:
      if (exponent != most_exponent) break;
      return mantissa != 0 ? nan : signed_one * std::numeric_limits<float>::infinity();
    case FloatLayout::Special::kLastIsNan:
      if (exponent == most_exponent && mantissa == most_mantissa) return nan;
      break;
    case FloatLayout::Special::kMinusZeroNan:
      if (sign != 0 && exponent == 0 && mantissa == 0) return nan;
      break;
  }
  const uint32_t significand = exponent == 0 ? mantissa : mantissa | (most_mantissa + 1);
  const int power = static_cast<int>(exponent == 0 ? 1 : exponent) - layout.bias - layout.mantissa_bits;
  return std::ldexp(signed_one * static_cast<float>(significand), power);
}

std::array<float, 256> table_of(const FloatLayout& layout) {
  std::array<float, 256> values;
  for (uint32_t code = 0; code < values.size(); ++code) values[code] = value_of_code(layout, code);
  return values;
}

std::array<float, 256> powers_of_two(float last) {
  std::array<float, 256> values;
  for (int code = 0; code < 256; ++code) values[static_cast<size_t>(code)] = std::ldexp(1.0f, code - 127);
  values[255] = last;
  return values;
}

float half_value(uint16_t half) {
  static constexpr FloatLayout kLayout{5, 10, 15, FloatLayout::Special::kIeee};
  return value_of_code(kLayout, half);
}

}  // namespace

bool is_small_float(DType dtype) {
  return dtype >= DType::kFloat8E4M3FN && dtype <= DType::kFloat4E2M1FNX2;
}

const float* values_of_codes(DType dtype) {
  using Special = FloatLayout::Special;
  static const std::array<float, 256> e4m3fn = table_of({4, 3, 7, Special::kLastIsNan});
  static const std::array<float, 256> e4m3fnuz = table_of({4, 3, 8, Special::kMinusZeroNan});
  static const std::array<float, 256> e5m2 = table_of({5, 2, 15, Special::kIeee});
  static const std::array<float, 256> e5m2fnuz = table_of({5, 2, 16, Special::kMinusZeroNan});
  static const std::array<float, 256> e8m0fnu = powers_of_two(std::numeric_limits<float>::quiet_NaN());
  static constexpr float kE2M1[] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  switch (dtype) {
    case DType::kFloat8E4M3FN:
      return e4m3fn.data();
    case DType::kFloat8E4M3FNUZ:
      return e4m3fnuz.data();
    case DType::kFloat8E5M2:
      return e5m2.data();
    case DType::kFloat8E5M2FNUZ:
      return e5m2fnuz.data();
    case DType::kFloat8E8M0FNU:
      return e8m0fnu.data();
    default:
      return kE2M1;
  }
}

bool is_scale_dtype(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16 ||
         dtype == DType::kFloat8E8M0FNU || dtype == DType::kUInt8;
}

float scale_at(DType dtype, const uint8_t* scales, int64_t index) {
  static const std::array<float, 256> exponents = powers_of_two(std::numeric_limits<float>::infinity());
  if (dtype == DType::kUInt8) return exponents[scales[index]];
  if (dtype == DType::kFloat8E8M0FNU) return values_of_codes(dtype)[scales[index]];
  if (dtype == DType::kFloat32) {
    float value;
    std::memcpy(&value, scales + index * 4, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, scales + index * 2, sizeof bits);
  return dtype == DType::kBFloat16 ? float_of_bits(uint32_t{bits} << 16) : half_value(bits);
}

}  // namespace bytecheckpoint::tensor
