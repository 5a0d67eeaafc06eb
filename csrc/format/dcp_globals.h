// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::format {

/// The globals that may stand in metadata of DCP, by what they mean; names that moved between modules are one.
enum DcpGlobal : uint32_t {
  kMetadata,
  kTensorStorageMetadata,
  kChunkStorageMetadata,
  kBytesStorageMetadata,
  kTensorProperties,
  kMemoryFormatEncoding,
  kMetadataIndex,
  kStorageMeta,
  kStorageInfo,  // of any module: writers beside DCP's have their own, with the same fields
  kTorchSize,
  kGetLayout,
  kPosixPath,
  kWindowsPath,
  kFirstDType = 256,  // and the code of the dtype
};

/// The allow-list.
std::optional<uint32_t> find_dcp_global(std::string_view module, std::string_view name);

/// The dtype that a global stands for; nullptr if it is another one.
const tensor::DTypeInfo* dtype_of_global(uint32_t global);

}  // namespace bytecheckpoint::format
