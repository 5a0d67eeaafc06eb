// SPDX-License-Identifier: Apache-2.0
#include "csrc/tensor/dtype.h"

#include <doctest/doctest.h>

#include <string>

namespace bytecheckpoint::tensor {
namespace {

TEST_CASE("dtype: the table answers to code and name alike, and to nothing else") {
  for (int code = 0; code < 256; ++code) {
    const DTypeInfo* info = find_dtype(static_cast<uint8_t>(code));
    REQUIRE((info != nullptr) == (code >= 1 && code <= kLastDType));
    if (info == nullptr) continue;
    CHECK(static_cast<int>(info->dtype) == code);
    CHECK(find_dtype(std::string_view(info->name)) == info);
    CHECK(find_dtype(info->dtype) == info);
    CHECK(info->is_plain() == (code <= 22 || code == 47));
    CHECK(find_plain_dtype(static_cast<uint8_t>(code)) == (info->is_plain() ? info : nullptr));
    const int64_t size = info->itemsize_bytes;
    CHECK((!info->is_plain() || size == 1 || size == 2 || size == 4 || size == 8 || size == 16));
  }
  CHECK(find_dtype(std::string_view("")) == nullptr);
  CHECK(find_dtype(std::string_view("torch.float32")) == nullptr);
  CHECK(find_dtype(DType::kNone) == nullptr);
}

TEST_CASE("dtype: codes are on disk and stay what they are") {
  CHECK(std::string(find_dtype(uint8_t{1})->name) == "float64");
  CHECK(std::string(find_dtype(uint8_t{4})->name) == "bfloat16");
  CHECK(std::string(find_dtype(uint8_t{12})->name) == "complex128");
  CHECK(std::string(find_dtype(uint8_t{16})->name) == "uint64");
  CHECK(std::string(find_dtype(uint8_t{17})->name) == "float8_e4m3fn");
  CHECK(std::string(find_dtype(uint8_t{22})->name) == "float4_e2m1fn_x2");
  CHECK(std::string(find_dtype(uint8_t{23})->name) == "qint8");
  CHECK(std::string(find_dtype(uint8_t{32})->name) == "bits16");
  CHECK(std::string(find_dtype(uint8_t{39})->name) == "uint7");
  CHECK(std::string(find_dtype(uint8_t{46})->name) == "int7");
  CHECK(std::string(find_dtype(uint8_t{47})->name) == "bcomplex32");
}

}  // namespace
}  // namespace bytecheckpoint::tensor
