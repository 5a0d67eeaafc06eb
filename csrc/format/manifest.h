// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/bytes.h"
#include "csrc/base/status.h"
#include "csrc/format/data_file.h"
#include "csrc/format/tree.h"
#include "csrc/tensor/box.h"
#include "csrc/tensor/dtype.h"
#include "csrc/tensor/tensor_info.h"

namespace bytecheckpoint::format {

/// Most dims that a tensor can have: their number is one byte on disk.
inline constexpr size_t kMaxDims = 255;

/// Kinds of records; on disk, never renumber.
enum class RecordKind : uint8_t {
  kTensor = 1,  // zip archive made by ZipRecord: data is data_bytes at data_offset
  kOpaque = 2,  // bytes of torch.save
  kBytes = 3,   // what the planner produced
  // Of foreign checkpoints, never on disk:
  kForeign = 100,  // a torch.save archive of a tensor; what is in it is not known before it is opened
  kAbsent = 101,   // the metadata names the chunk, but not its place
};

/// Where one record lies. Offsets count from the start of its file.
struct Record {
  RecordKind kind = RecordKind::kBytes;
  tensor::DType stored_dtype =
      tensor::DType::kNone;  // of a tensor record; a planner may store another than it declares
  uint32_t file = 0;         // index into the files
  int64_t offset = 0;
  int64_t bytes = 0;
  int64_t data_offset = 0;  // of a tensor record: its elements, row-major
  int64_t data_bytes = 0;
};

struct Chunk {
  tensor::Box box;  // of the item's tensor; no dims for a bytes item
  Record record;
};

/// One entry of the state dict: a tensor with its chunks in the order of DCP's metadata, or a bytes item with one.
struct Item {
  std::string fqn;
  bool is_tensor = false;
  bool is_partial = false;  // on purpose: its chunks need not cover the tensor
  uint32_t ordinal = 0;     // position in the state dict that was saved
  tensor::TensorInfo tensor;
  std::vector<Chunk> chunks;
};

struct FileEntry {
  std::string name;
  DataFileId id;
  int64_t bytes = 0;
  uint32_t trailer_crc = 0;
};

/// What the metadata of a foreign checkpoint says beside its tensors.
struct ForeignMeta {
  Tree storage_meta;  // none, or a dict of the attributes of DCP's StorageMeta, paths as strings
  bool checkpoint_id_is_path = false;
  Tree version;  // none, or a string
};

/// What a checkpoint contains, and where.
///
/// Of a foreign checkpoint, one that another writer made, it is only known what DCP's own metadata say: records are
/// kForeign or kBytes, files have a name and nothing else, there is no save id.
struct Manifest {
  std::optional<ForeignMeta> foreign;
  base::Id save_id{};
  std::string checkpoint_id;  // path as the writer knew it
  std::vector<Item> items;    // sorted by the UTF-8 bytes of their FQNs, unique
  std::vector<FileEntry> files;
  Tree planner_data;
  std::string user_metadata;  // JSON, or empty

  /// Binary search; nullptr if absent.
  const Item* find(std::string_view fqn) const;
};

/// Serialised manifest; FORMAT.md has the fields. Items must be sorted and unique.
std::string encode_manifest(const Manifest& manifest);

/// kCorrupt, kVersion. Everything is checked that later code relies on: every index, box and range is valid, boxes lie
/// in their tensors, records in their files, file names are ours. Never reads past `bytes`, never allocates more than
/// 16 times as much and 64 KiB.
base::Result<Manifest> decode_manifest(std::string_view bytes);

}  // namespace bytecheckpoint::format
