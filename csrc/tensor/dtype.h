// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace bytecheckpoint::tensor {

/// Element types of the format. Their codes are on disk: never change one, only append.
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
  // Only in opaque records: types whose elements are not whole bytes of their own, or for which torch has no
  // arithmetic.
  kQInt8 = 23,
  kQUInt8 = 24,
  kQInt32 = 25,
  kQUInt4X2 = 26,
  kQUInt2X4 = 27,
  kBits1X8 = 28,
  kBits2X4 = 29,
  kBits4X2 = 30,
  kBits8 = 31,
  kBits16 = 32,
  kUInt1 = 33,
  kUInt2 = 34,
  kUInt3 = 35,
  kUInt4 = 36,
  kUInt5 = 37,
  kUInt6 = 38,
  kUInt7 = 39,
  kInt1 = 40,
  kInt2 = 41,
  kInt3 = 42,
  kInt4 = 43,
  kInt5 = 44,
  kInt6 = 45,
  kInt7 = 46,
  kBComplex32 = 47,  // plain again: two bfloat16
};

/// What the format knows of one dtype.
struct DTypeInfo {
  DType dtype;
  const char* name;           // as in `torch.<name>`
  int64_t itemsize_bytes;     // of one torch element (one of float4_e2m1fn_x2 is a byte with two values); 0: opaque
  const char* typed_storage;  // `torch.<class>` in a record's pickle; nullptr: UntypedStorage and a trailing dtype

  /// Returns whether tensor records can store this dtype, as plain row-major elements.
  bool is_plain() const { return itemsize_bytes != 0; }
};

/// Returns the facts about a code, or nullptr if no dtype has it. Codes come from disk, so callers must handle nullptr.
/// O(1).
const DTypeInfo* find_dtype(uint8_t code);
/// Does the same, but also returns nullptr for a dtype that is not plain.
const DTypeInfo* find_plain_dtype(uint8_t code);
inline const DTypeInfo* find_plain_dtype(DType dtype) {
  return find_plain_dtype(static_cast<uint8_t>(dtype));
}
inline const DTypeInfo* find_dtype(DType dtype) {
  return find_dtype(static_cast<uint8_t>(dtype));
}
/// Finds a dtype by torch's name without the `torch.` prefix, as in `float32`. \returns nullptr if there is none.
const DTypeInfo* find_dtype(std::string_view name);
/// Returns the dtype of this name; kNone if there is none.
inline DType dtype_of(std::string_view name) {
  const DTypeInfo* info = find_dtype(name);
  return info == nullptr ? DType::kNone : info->dtype;
}

/// The largest code. All codes from 1 to kLastDType are valid.
inline constexpr uint8_t kLastDType = 47;

/// Whether the elements have an imaginary part.
inline bool is_complex(DType dtype) {
  return dtype == DType::kComplex32 || dtype == DType::kBComplex32 || dtype == DType::kComplex64 ||
         dtype == DType::kComplex128;
}

}  // namespace bytecheckpoint::tensor
