// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::format {

inline constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";

/// The globals that may stand in DCP's metadata, by their meaning: names of one class in several modules are one value.
enum DcpGlobal : uint32_t {
  kMetadata,
  kMetadataOfByteCheckpoint,  // of ByteCheckpoint 0.0.x: the same attributes, and one more
  kTensorStorageMetadata,
  kChunkStorageMetadata,
  kBytesStorageMetadata,
  kTensorProperties,
  kMemoryFormatEncoding,
  kMetadataIndex,
  kStorageMeta,
  kStorageInfo,  // in any module: other writers than DCP's have a class of their own with the same fields
  kTorchSize,
  kGetLayout,
  kOfPlan,  // of which plans of saves are made; never looked at
  kPosixPath,
  kWindowsPath,
  kFirstDType = 256,  // kFirstDType + the code of the dtype is that dtype
};

/// Returns the value of DcpGlobal for `module.name`, or nothing if metadata may not name it. This is the allow-list.
std::optional<uint32_t> find_dcp_global(std::string_view module, std::string_view name);

/// Returns the dtype that a global stands for, or nullptr if it is no dtype.
const tensor::DTypeInfo* dtype_of_global(uint32_t global);

}  // namespace bytecheckpoint::format
