// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace bytecheckpoint::format {

/// The classes and functions that a pickle of standard types may name; all others are refused. Of each the arguments
/// that its own pickler writes are known, and nothing else is let in: `bytearray(b"x")`, but not `bytearray(1 << 40)`.
enum class StandardGlobal : uint32_t {
  kEncode,  // `_codecs.encode`, by which protocol 2 writes bytes
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
  // Only as what makes the missing values of a defaultdict, as kBytes and others above may do, too.
  kInt,
  kFloat,
  kBool,
  kStr,
  kList,
  kTuple,
  kDict,
  kObject,
  kTorchDType,  // + code of the dtype: these are values
};

/// Of `module.name` in any of the spellings by which Python 3 and numpy 1 and 2 pickle it.
std::optional<uint32_t> find_standard_global(std::string_view module, std::string_view name);

}  // namespace bytecheckpoint::format
