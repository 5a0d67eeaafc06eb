// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "csrc/base/status.h"
#include "csrc/format/archive/archive_reader.h"
#include "csrc/format/torch/pickle_entry.h"
#include "csrc/format/torch/pickled_tensor.h"
#include "csrc/tensor/box.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::format {

/// Where an archive of torch.save has the elements of a tensor.
///
/// Offsets count from the start of the archive. Every element lies inside the storage, and the storage inside the
/// archive:
///
///     | other entries | storage:  .  .  e  .  e  .  e  .  | directory |
///                     ^ storage_offset  ^ data_offset, the first element; sizes and strides say where the others are
struct ArchivedTensor {
  tensor::DType dtype = tensor::DType::kNone;  // plain
  tensor::Dims sizes;
  tensor::Dims strides;     // elements, >= 0; as many as sizes
  int64_t data_offset = 0;  // of element [0, ..., 0]; storage_offset if there are no elements
  int64_t storage_offset = 0;
  int64_t storage_bytes = 0;
  std::optional<uint32_t> storage_crc;  // CRC-32 of the storage; none if the writer was set to compute none
  bool is_conj = false;                 // the elements are the conjugates of what is stored
  bool is_neg = false;                  // the elements are the negatives of what is stored
};

/// Places a tensor in its storage, whose content begins at `storage_offset` of the archive. \returns kCorrupt if the
/// storage has another length than the pickle says, or if the tensor reaches out of it.
base::Result<ArchivedTensor> place_tensor(PickledTensor pickled, const ZipEntry& storage, int64_t storage_offset);

/// Finds the elements of a tensor in the archive whose pickle describes it.
///
/// \returns nullopt for a storage that is left to `torch.load`, such as a compressed one; kCorrupt if there is no such
/// storage or the tensor reaches out of it.
base::Result<std::optional<ArchivedTensor>> locate_tensor(PickledTensor pickled, const PickleEntry& entry,
                                                          ArchiveReader* archive);

/// Finds the elements of a record that `torch.save` wrote of one tensor or Parameter. Does not read the elements, and
/// runs nothing of the pickle.
///
/// Needs two reads of what torch writes, one at the end and one at the start; a single one if the record is small. The
/// CRC of the pickle is checked; that of the storage is returned.
///
/// \returns nullopt for an archive of anything else, which is left to `torch.load`: quantized, sparse or compressed
/// tensors, subclasses, several storages, the other byte order. kUnsupported for what is no archive of torch.save;
/// kCorrupt for a damaged one, or a tensor that reaches out of its storage.
base::Result<std::optional<ArchivedTensor>> read_tensor_archive(int64_t archive_bytes, const ReadBytes& read);

}  // namespace bytecheckpoint::format
