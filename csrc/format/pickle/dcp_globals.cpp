// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle/dcp_globals.h"

namespace bytecheckpoint::format {
namespace {

struct Entry {
  std::string_view module;
  std::string_view name;
  DcpGlobal global;
};

constexpr std::string_view kOldestModule = "torch.distributed._shard.checkpoint.metadata";  // in torch 1.13
constexpr std::string_view kPlannerModule = "torch.distributed.checkpoint.planner";
constexpr std::string_view kOlderModule = "torch.distributed._shard.sharded_tensor.metadata";

constexpr Entry kEntries[] = {
    {kMetadataModule, "Metadata", kMetadata},
    {"bytecheckpoint.checkpointer.meta_type", "Metadata", kMetadataOfByteCheckpoint},
    {kMetadataModule, "TensorStorageMetadata", kTensorStorageMetadata},
    {kMetadataModule, "ChunkStorageMetadata", kChunkStorageMetadata},
    {kMetadataModule, "BytesStorageMetadata", kBytesStorageMetadata},
    {kMetadataModule, "TensorProperties", kTensorProperties},
    {kOlderModule, "TensorProperties", kTensorProperties},
    {kMetadataModule, "_MEM_FORMAT_ENCODING", kMemoryFormatEncoding},
    {kOlderModule, "MEM_FORMAT_ENCODING", kMemoryFormatEncoding},
    {kMetadataModule, "MetadataIndex", kMetadataIndex},
    {kMetadataModule, "StorageMeta", kStorageMeta},
    {kPlannerModule, "SavePlan", kOfPlan},
    {kPlannerModule, "WriteItem", kOfPlan},
    {kPlannerModule, "WriteItemType", kOfPlan},
    {kPlannerModule, "TensorWriteData", kOfPlan},
    {kPlannerModule, "BytesIOWriteData", kOfPlan},
    {"torch", "Size", kTorchSize},
    {"torch.serialization", "_get_layout", kGetLayout},
};

bool is_pathlib(std::string_view module) {
  return module == "pathlib" || module == "pathlib._local";  // the latter in Python 3.13
}

}  // namespace

std::optional<uint32_t> find_dcp_global(std::string_view module, std::string_view name) {
  if (module == kOldestModule) module = kMetadataModule;
  for (const Entry& entry : kEntries) {
    if (entry.module == module && entry.name == name) return entry.global;
  }
  if (name == "_StorageInfo") return kStorageInfo;
  if (is_pathlib(module)) {
    if (name == "PosixPath" || name == "PurePosixPath") return kPosixPath;
    if (name == "WindowsPath" || name == "PureWindowsPath") return kWindowsPath;
  }
  if (module == "torch") {
    const tensor::DTypeInfo* info = tensor::find_dtype(name);
    if (info != nullptr) return kFirstDType + static_cast<uint32_t>(info->dtype);
  }
  return std::nullopt;
}

const tensor::DTypeInfo* dtype_of_global(uint32_t global) {
  if (global < kFirstDType || global > kFirstDType + tensor::kLastDType) return nullptr;
  return tensor::find_dtype(static_cast<uint8_t>(global - kFirstDType));
}

}  // namespace bytecheckpoint::format
