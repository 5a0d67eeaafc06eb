// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace bytecheckpoint::tensor {

/// Element types of the format. The codes are on disk: never renumber, only append.
enum class DType : uint8_t {
  kNone = 0,  // not a tensor record
  kFloat64 = 1,
  kFloat32 = 2,
  kFloat16 = 3,
  kBFloat16 = 4,
  kInt64 = 5,
  kInt32 = 6,
  kInt16 = 7,
  kInt8 = 8,
  kUInt8 = 9,
  kBool = 10,
  kComplex64 = 11,
  kComplex128 = 12,
  kComplex32 = 13,
  kUInt16 = 14,
  kUInt32 = 15,
  kUInt64 = 16,
  kFloat8E4M3FN = 17,
  kFloat8E4M3FNUZ = 18,
  kFloat8E5M2 = 19,
  kFloat8E5M2FNUZ = 20,
  kFloat8E8M0FNU = 21,
  kFloat4E2M1FNX2 = 22,
};

struct DTypeInfo {
  DType dtype;
  const char* name;           // as in `torch.<name>`
  int64_t itemsize_bytes;     // of one element as torch counts them (float4_e2m1fn_x2: one byte, two values)
  const char* typed_storage;  // `torch.<class>` in a record's pickle; nullptr: UntypedStorage and a trailing dtype
};

/// Facts about a code, or nullptr if it is not in the table. Codes come from disk: always ask.
const DTypeInfo* find_dtype(uint8_t code);
inline const DTypeInfo* find_dtype(DType dtype) {
  return find_dtype(static_cast<uint8_t>(dtype));
}
/// By torch's name without the `torch.` prefix.
const DTypeInfo* find_dtype(std::string_view name);

/// Largest code in the table; codes 1..kLastDType are all valid.
inline constexpr uint8_t kLastDType = 22;

}  // namespace bytecheckpoint::tensor
