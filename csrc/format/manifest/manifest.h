// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/bytes.h"
#include "csrc/base/file_version.h"
#include "csrc/base/packing.h"
#include "csrc/base/status.h"
#include "csrc/format/data_file.h"
#include "csrc/format/tree.h"
#include "csrc/tensor/box.h"
#include "csrc/tensor/dtype.h"
#include "csrc/tensor/tensor_info.h"

namespace bytecheckpoint::format {

/// Largest number of dims of a tensor: the number is one byte on disk.
inline constexpr size_t kMaxDims = 255;

/// Kinds of records. The numbers are on disk: never change one.
enum class RecordKind : uint8_t {
  kTensor = 1,  // zip archive made by ZipRecord; its elements are data_bytes bytes at data_offset
  kOpaque = 2,  // archive that torch.save wrote of a tensor that is not plain
  kBytes = 3,   // bytes of an object, as the planner produced them
  // Only in manifests of other writers' checkpoints, never on disk:
  kForeign = 100,  // torch.save archive of a tensor, whose content is not known before it is opened
  kAbsent = 101,   // the metadata name the chunk, but not its place
  kStrided = 102,  // elements at data_offset, as ForeignMeta::strides[data_bytes] says
  kInline = 103,   // an object whose pickle is data_bytes bytes at data_offset of ForeignMeta::texts
  kRefused = 104,  // a value that cannot be read; the reason is data_bytes bytes at data_offset of ForeignMeta::texts
};

/// The place of one record. Offsets count from the start of its file, in bytes.
struct Record {
  RecordKind kind = RecordKind::kBytes;
  /// Dtype of a tensor record. A planner may store another one than the item declares.
  tensor::DType stored_dtype = tensor::DType::kNone;
  uint32_t file = 0;  // index into Manifest::files
  int64_t offset = 0;
  int64_t bytes = 0;
  int64_t data_offset = 0;  // of a tensor record: of its elements, which are row-major
  int64_t data_bytes = 0;
};

/// A box of a tensor, or a bytes object, and the record that holds it.
struct Chunk {
  tensor::Box box;  // of the item's tensor; no dims for a bytes item
  Record record;
};

/// One entry of the state dict: a tensor with its chunks in the order of DCP's metadata, or an object with one chunk.
struct Item {
  std::string fqn;
  bool is_tensor = false;
  bool is_partial = false;  // the save was told that its chunks need not cover the tensor
  uint32_t ordinal = 0;     // position in the state dict that was saved
  tensor::TensorInfo tensor;
  std::vector<Chunk> chunks;
};

/// One data file of a checkpoint.
struct FileEntry {
  std::string name;
  DataFileId id;
  int64_t bytes = 0;
  uint32_t trailer_crc = 0;
  base::FileVersion version;  // of another writer's file, when the checkpoint was opened
  base::Packing packing{};    // of another writer's: then records are in what it unpacks to
};

/// The checksum that another writer stored of a stretch of a file.
struct StoredCrc {
  uint32_t file = 0;
  int64_t offset = 0;
  int64_t bytes = 0;
  uint32_t crc = 0;
};

/// The file that says which data files there are: DCP's `.metadata`, or an index.
struct DescribingFile {
  std::string directory;
  std::string name;           // empty if there is none
  base::FileVersion version;  // when the checkpoint was opened
};

/// What the metadata of another writer's checkpoint say beside its tensors.
struct ForeignMeta {
  Tree storage_meta;  // None, or a dict of the attributes of DCP's StorageMeta, paths as strings
  bool checkpoint_id_is_path = false;
  Tree version;                        // None, or a string
  std::string directory;               // of the data files, if it is another than what was opened
  const char* format = "dcp";          // what `Checkpoint.format` tells Python
  bool is_of_byte_checkpoint = false;  // ByteCheckpoint 0.0.x wrote it
  DescribingFile description;
  std::string note;        // for users, to whoever opens it
  bool is_packed = false;  // some file is: to be read from front to back
  // Of files of torch.save:
  std::vector<tensor::Dims> strides;  // of kStrided records, in elements
  std::vector<StoredCrc> crcs;        // sorted by file and offset
  std::string texts;                  // pickles of kInline records and reasons of kRefused ones, one behind the other

  /// Returns what `texts` holds of a kInline or kRefused record.
  std::string_view text_of(const Record& record) const {
    return std::string_view(texts).substr(static_cast<size_t>(record.data_offset),
                                          static_cast<size_t>(record.data_bytes));
  }
};

/// What a checkpoint contains, and where.
///
/// The manifest of another writer's checkpoint ("foreign") knows only what DCP's metadata say: records are kForeign,
/// kBytes or kAbsent, files have nothing but a name, and there is no save id.
struct Manifest {
  std::optional<ForeignMeta> foreign;  // set if another writer made the checkpoint
  base::Id save_id{};
  std::string checkpoint_id;  // the path that was given to the writer
  std::vector<Item> items;    // sorted by the UTF-8 bytes of their FQNs, unique
  std::vector<FileEntry> files;
  Tree planner_data;
  std::string user_metadata;  // JSON, or empty

  /// Returns the directory of the data files. \param opened  Path that the manifest was read from.
  std::string data_directory(const std::string& opened) const {
    return foreign.has_value() && !foreign->directory.empty() ? foreign->directory : opened;
  }
  /// Finds an item by a binary search. \returns nullptr if there is none of this name.
  const Item* find(std::string_view fqn) const;
};

/// Encodes a manifest as FORMAT.md says. Its items must be sorted and unique.
std::string encode_manifest(const Manifest& manifest);

/// Decodes a manifest, which may be damaged or hostile, and checks all that later code relies on: every index, box and
/// range is valid, boxes lie in their tensors, records lie in their files, and file names are such as we make.
/// \returns kCorrupt for damage, kVersion for a newer version.
/// Never reads past `bytes`, and never allocates more than 16 times their size and 64 KiB.
base::Result<Manifest> decode_manifest(std::string_view bytes);

}  // namespace bytecheckpoint::format
