// SPDX-License-Identifier: Apache-2.0
#include "csrc/tensor/small_floats.h"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

namespace bytecheckpoint::tensor {
namespace {

TEST_CASE("small floats: the codes at the ends of each dtype, and NaN") {
  struct Known {
    DType dtype;
    uint8_t largest, smallest;  // codes of positive numbers
    float largest_value, smallest_value;
    uint8_t nan;
  };
  for (const Known& known : {
           Known{DType::kFloat8E4M3FN, 0x7E, 0x01, 448.0f, 0x1p-9f, 0x7F},
           Known{DType::kFloat8E4M3FNUZ, 0x7F, 0x01, 240.0f, 0x1p-10f, 0x80},
           Known{DType::kFloat8E5M2, 0x7B, 0x01, 57344.0f, 0x1p-16f, 0x7D},
           Known{DType::kFloat8E5M2FNUZ, 0x7F, 0x01, 57344.0f, 0x1p-17f, 0x80},
       }) {
    const float* values = values_of_codes(known.dtype);
    CHECK(values[known.largest] == known.largest_value);
    CHECK(values[known.smallest] == known.smallest_value);
    CHECK(std::isnan(values[known.nan]));
    CHECK(values[0] == 0.0f);
    for (int code = 1; code <= known.largest; ++code) {
      CHECK(values[code] > values[code - 1]);
      CHECK(values[code + 128] == -values[code]);
    }
  }
  CHECK(std::signbit(values_of_codes(DType::kFloat8E4M3FN)[0x80]));
  CHECK(values_of_codes(DType::kFloat8E5M2)[0xFC] == -std::numeric_limits<float>::infinity());
  CHECK(values_of_codes(DType::kFloat8E8M0FNU)[0] == 0x1p-127f);
  CHECK(std::isnan(values_of_codes(DType::kFloat8E8M0FNU)[255]));
  CHECK(std::signbit(values_of_codes(DType::kFloat4E2M1FNX2)[8]));
  CHECK(values_of_codes(DType::kFloat4E2M1FNX2)[15] == -6.0f);
}

TEST_CASE("small floats: scales of each dtype") {
  const uint8_t bytes[] = {0, 127, 254, 255};
  CHECK(scale_at(DType::kUInt8, bytes, 0) == 0x1p-127f);
  CHECK(scale_at(DType::kUInt8, bytes, 1) == 1.0f);
  CHECK(scale_at(DType::kUInt8, bytes, 2) == 0x1p127f);
  CHECK(scale_at(DType::kUInt8, bytes, 3) == std::numeric_limits<float>::infinity());
  CHECK(std::isnan(scale_at(DType::kFloat8E8M0FNU, bytes, 3)));
  const uint16_t halves[] = {0x3C00, 0x0001, 0xFBFF, 0x7C00};
  const auto* half = reinterpret_cast<const uint8_t*>(halves);
  CHECK(scale_at(DType::kFloat16, half, 0) == 1.0f);
  CHECK(scale_at(DType::kFloat16, half, 1) == 0x1p-24f);
  CHECK(scale_at(DType::kFloat16, half, 2) == -65504.0f);
  CHECK(scale_at(DType::kFloat16, half, 3) == std::numeric_limits<float>::infinity());
  CHECK(scale_at(DType::kBFloat16, half, 0) == float_of_bits(0x3C000000));
}

/// Rounding must keep every value of the small dtype, and of the midpoint between two the one with the even code.
template <class Round, class ValueOf>
void check_rounding(Round round, ValueOf value_of, uint16_t infinity) {
  for (uint16_t code = 0; code < infinity; ++code) {
    const double here = value_of(code),
                 next = code + 1 == infinity ? 2 * here - value_of(code - 1) : value_of(code + 1);
    const auto middle = static_cast<float>((here + next) / 2);
    REQUIRE(static_cast<double>(middle) == (here + next) / 2);
    REQUIRE(round(static_cast<float>(here)) == code);
    REQUIRE(round(-static_cast<float>(here)) == (code | 0x8000));
    REQUIRE(round(middle) == code + code % 2);
    REQUIRE(round(std::nextafter(middle, 0.0f)) == code);
    REQUIRE(round(std::nextafter(middle, INFINITY)) == code + 1);
  }
  CHECK(round(INFINITY) == infinity);
  CHECK(round(-INFINITY) == (infinity | 0x8000));
  CHECK((round(NAN) & 0x7FFF) > infinity);
}

TEST_CASE("small floats: rounding to float16 and bfloat16, at every value, every midpoint and beside it") {
  const auto half_of = [](uint16_t code) {
    return double{scale_at(DType::kFloat16, reinterpret_cast<const uint8_t*>(&code), 0)};
  };
  check_rounding(to_float16, half_of, 0x7C00);
  const auto brain_of = [](uint16_t code) {
    return double{scale_at(DType::kBFloat16, reinterpret_cast<const uint8_t*>(&code), 0)};
  };
  check_rounding(to_bfloat16, brain_of, 0x7F80);
  CHECK(to_bfloat16(NAN) == 0x7FC0);
  CHECK(to_bfloat16(float_of_bits(0xFFFFFFFF)) == 0x7FC0);
  CHECK(to_float16(1e30f) == 0x7C00);
}

}  // namespace
}  // namespace bytecheckpoint::tensor
