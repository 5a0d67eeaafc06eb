// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle/standard_globals.h"

#include <cstddef>

#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::format {
namespace {

using Global = StandardGlobal;

struct Name {
  std::string_view module, name;
  Global global;
};

// Protocol 2 writes the names of Python 2 where Python 3 has others. pathlib and numpy have moved their classes to
// other modules.
constexpr Name kNames[] = {
    {"_codecs", "encode", Global::kEncode},
    {"_io", "BytesIO", Global::kBytesIO},
    {"collections", "Counter", Global::kCounter},
    {"collections", "OrderedDict", Global::kOrderedDict},
    {"collections", "defaultdict", Global::kDefaultDict},
    {"collections", "deque", Global::kDeque},
    {"datetime", "date", Global::kDate},
    {"datetime", "datetime", Global::kDateTime},
    {"datetime", "time", Global::kTime},
    {"datetime", "timedelta", Global::kTimeDelta},
    {"datetime", "timezone", Global::kTimeZone},
    {"decimal", "Decimal", Global::kDecimal},
    {"fractions", "Fraction", Global::kFraction},
    {"numpy", "dtype", Global::kNumpyDType},
    {"numpy", "ndarray", Global::kNumpyArray},
    {"numpy._core.multiarray", "_reconstruct", Global::kNumpyReconstruct},
    {"numpy._core.multiarray", "scalar", Global::kNumpyScalar},
    {"numpy._core.numeric", "_frombuffer", Global::kNumpyFromBuffer},
    {"numpy.core.multiarray", "_reconstruct", Global::kNumpyReconstruct},
    {"numpy.core.multiarray", "scalar", Global::kNumpyScalar},
    {"numpy.core.numeric", "_frombuffer", Global::kNumpyFromBuffer},
    {"torch", "Size", Global::kTorchSize},
    {"torch", "device", Global::kTorchDevice},
    {"torch._utils", "_rebuild_parameter", Global::kRebuildParameter},
    {"torch._utils", "_rebuild_tensor_v2", Global::kRebuildTensorV2},
    {"torch._utils", "_rebuild_tensor_v3", Global::kRebuildTensorV3},
    {"torch.storage", "UntypedStorage", Global::kUntypedStorage},
    {"types", "SimpleNamespace", Global::kSimpleNamespace},
    {"uuid", "UUID", Global::kUuid},
};

constexpr Name kPaths[] = {
    {"", "PosixPath", Global::kPosixPath},
    {"", "PurePosixPath", Global::kPurePosixPath},
    {"", "PureWindowsPath", Global::kPureWindowsPath},
    {"", "WindowsPath", Global::kWindowsPath},
};

constexpr Name kBuiltins[] = {
    {"", "bool", Global::kBool},
    {"", "bytearray", Global::kByteArray},
    {"", "bytes", Global::kBytes},
    {"", "complex", Global::kComplex},
    {"", "dict", Global::kDict},
    {"", "float", Global::kFloat},
    {"", "frozenset", Global::kFrozenSet},
    {"", "int", Global::kInt},
    {"", "list", Global::kList},
    {"", "long", Global::kInt},
    {"", "object", Global::kObject},
    {"", "range", Global::kRange},
    {"", "set", Global::kSet},
    {"", "slice", Global::kSlice},
    {"", "str", Global::kStr},
    {"", "tuple", Global::kTuple},
    {"", "unicode", Global::kStr},
    {"", "xrange", Global::kRange},
};

template <size_t N>
std::optional<uint32_t> find_in(const Name (&names)[N], std::string_view module, std::string_view name) {
  for (const Name& known : names) {
    if (name == known.name && module == known.module) return static_cast<uint32_t>(known.global);
  }
  return std::nullopt;
}

}  // namespace

std::optional<uint32_t> find_standard_global(std::string_view module, std::string_view name) {
  if (module == "builtins" || module == "__builtin__") return find_in(kBuiltins, "", name);
  if (module == "pathlib" || module == "pathlib._local") return find_in(kPaths, "", name);
  if (module == "torch") {
    const tensor::DTypeInfo* dtype = tensor::find_dtype(name);
    if (dtype != nullptr) return static_cast<uint32_t>(Global::kTorchDType) + static_cast<uint32_t>(dtype->dtype);
    for (uint8_t code = 1; code <= tensor::kLastDType; ++code) {
      const char* storage = tensor::find_dtype(code)->typed_storage;
      if (storage != nullptr && name == storage) return static_cast<uint32_t>(Global::kTorchStorage) + code;
    }
  }
  return find_in(kNames, module, name);
}

}  // namespace bytecheckpoint::format
