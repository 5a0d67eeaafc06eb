// SPDX-License-Identifier: Apache-2.0
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::tensor {
namespace {

constexpr DTypeInfo kTable[kLastDType] = {
    {DType::kFloat64, "float64", 8, "DoubleStorage"},
    {DType::kFloat32, "float32", 4, "FloatStorage"},
    {DType::kFloat16, "float16", 2, "HalfStorage"},
    {DType::kBFloat16, "bfloat16", 2, "BFloat16Storage"},
    {DType::kInt64, "int64", 8, "LongStorage"},
    {DType::kInt32, "int32", 4, "IntStorage"},
    {DType::kInt16, "int16", 2, "ShortStorage"},
    {DType::kInt8, "int8", 1, "CharStorage"},
    {DType::kUInt8, "uint8", 1, "ByteStorage"},
    {DType::kBool, "bool", 1, "BoolStorage"},
    {DType::kComplex64, "complex64", 8, "ComplexFloatStorage"},
    {DType::kComplex128, "complex128", 16, "ComplexDoubleStorage"},
    {DType::kComplex32, "complex32", 4, nullptr},
    {DType::kUInt16, "uint16", 2, nullptr},
    {DType::kUInt32, "uint32", 4, nullptr},
    {DType::kUInt64, "uint64", 8, nullptr},
    {DType::kFloat8E4M3FN, "float8_e4m3fn", 1, nullptr},
    {DType::kFloat8E4M3FNUZ, "float8_e4m3fnuz", 1, nullptr},
    {DType::kFloat8E5M2, "float8_e5m2", 1, nullptr},
    {DType::kFloat8E5M2FNUZ, "float8_e5m2fnuz", 1, nullptr},
    {DType::kFloat8E8M0FNU, "float8_e8m0fnu", 1, nullptr},
    {DType::kFloat4E2M1FNX2, "float4_e2m1fn_x2", 1, nullptr},
    {DType::kQInt8, "qint8", 0, nullptr},
    {DType::kQUInt8, "quint8", 0, nullptr},
    {DType::kQInt32, "qint32", 0, nullptr},
    {DType::kQUInt4X2, "quint4x2", 0, nullptr},
    {DType::kQUInt2X4, "quint2x4", 0, nullptr},
    {DType::kBits1X8, "bits1x8", 0, nullptr},
    {DType::kBits2X4, "bits2x4", 0, nullptr},
    {DType::kBits4X2, "bits4x2", 0, nullptr},
    {DType::kBits8, "bits8", 0, nullptr},
    {DType::kBits16, "bits16", 0, nullptr},
    {DType::kUInt1, "uint1", 0, nullptr},
    {DType::kUInt2, "uint2", 0, nullptr},
    {DType::kUInt3, "uint3", 0, nullptr},
    {DType::kUInt4, "uint4", 0, nullptr},
    {DType::kUInt5, "uint5", 0, nullptr},
    {DType::kUInt6, "uint6", 0, nullptr},
    {DType::kUInt7, "uint7", 0, nullptr},
    {DType::kInt1, "int1", 0, nullptr},
    {DType::kInt2, "int2", 0, nullptr},
    {DType::kInt3, "int3", 0, nullptr},
    {DType::kInt4, "int4", 0, nullptr},
    {DType::kInt5, "int5", 0, nullptr},
    {DType::kInt6, "int6", 0, nullptr},
    {DType::kInt7, "int7", 0, nullptr},
    {DType::kBComplex32, "bcomplex32", 4, nullptr},
};

}  // namespace

const DTypeInfo* find_dtype(uint8_t code) {
  return code >= 1 && code <= kLastDType ? &kTable[code - 1] : nullptr;
}

const DTypeInfo* find_plain_dtype(uint8_t code) {
  const DTypeInfo* info = find_dtype(code);
  return info != nullptr && info->is_plain() ? info : nullptr;
}

const DTypeInfo* find_dtype(std::string_view name) {
  for (const DTypeInfo& info : kTable) {
    if (name == info.name) return &info;
  }
  return nullptr;
}

}  // namespace bytecheckpoint::tensor
