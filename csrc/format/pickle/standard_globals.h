// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace bytecheckpoint::format {

/// The classes and functions that a pickle of standard types may name; all others are refused. For each of them only
/// those arguments are accepted that its own pickler writes: `bytearray(b"x")`, but not `bytearray(1 << 40)`.
enum class StandardGlobal : uint32_t {
  kEncode,  // `_codecs.encode`: protocol 2 writes bytes with it
  kBytes,
  kByteArray,
  kSet,
  kFrozenSet,
  kComplex,
  kRange,
  kSlice,
  kBytesIO,
  kDate,
  kTime,
  kDateTime,
  kTimeDelta,
  kTimeZone,
  kDecimal,
  kFraction,
  kUuid,
  kPurePosixPath,
  kPosixPath,
  kPureWindowsPath,
  kWindowsPath,
  kOrderedDict,
  kDefaultDict,
  kDeque,
  kCounter,
  kSimpleNamespace,
  kNumpyDType,
  kNumpyArray,        // only as the first argument of kNumpyReconstruct
  kNumpyReconstruct,  // an array up to protocol 4
  kNumpyFromBuffer,   // an array of protocol 5
  kNumpyScalar,
  kTorchSize,
  kTorchDevice,
  kRebuildTensorV2,  // tensors, as read_pickled_tensor recognises them
  kRebuildTensorV3,
  kRebuildParameter,
  kUntypedStorage,
  // Only as the factory of a defaultdict, which makes its missing values. kBytes and others above may be factories,
  // too.
  kInt,
  kFloat,
  kBool,
  kStr,
  kList,
  kTuple,
  kDict,
  kObject,
  kTorchDType,                        // + code of the dtype; dtypes are values
  kTorchStorage = kTorchDType + 256,  // + code of the dtype; typed storages, only in tensors
};

/// Returns the number of `module.name`, in any spelling that Python 3 and numpy 1 and 2 write; nullopt if it is not
/// accepted.
std::optional<uint32_t> find_standard_global(std::string_view module, std::string_view name);

}  // namespace bytecheckpoint::format
