// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "csrc/base/status.h"
#include "csrc/format/archive_reader.h"
#include "csrc/tensor/box.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::format {

/// Where an archive of torch.save keeps the elements of its one tensor.
///
/// Offsets count from the start of the archive. Every element lies inside the storage, the storage inside the archive.
struct ArchivedTensor {
  tensor::DType dtype = tensor::DType::kNone;  // plain
  tensor::Dims sizes;
  tensor::Dims strides;     // elements, >= 0; as many as sizes
  int64_t data_offset = 0;  // of element [0, ..., 0]; of the storage if there are no elements
  int64_t storage_offset = 0;
  int64_t storage_bytes = 0;
  std::optional<uint32_t> storage_crc;  // CRC-32 of the storage, unless the writer was told to compute none
  bool is_conj = false;                 // the elements are the conjugates (the negatives) of what is stored
  bool is_neg = false;
};

/// Reads what `torch.save` wrote, without its elements: one tensor or Parameter over one storage.
///
/// Two reads, of the end and of the start, do for what torch writes; one if the record is small. The CRC of the pickle
/// is checked, that of the storage is handed on.
///
/// \returns nullopt for an archive of anything else, which `torch.load` may know how to read: quantized, sparse or
///   compressed, subclasses, several storages, the other byte order.
///   kUnsupported for what is no such archive; kCorrupt for a damaged one, or a tensor that reaches out of its storage.
/// Runs nothing of the pickle.
base::Result<std::optional<ArchivedTensor>> read_tensor_archive(int64_t archive_bytes, const ReadBytes& read);

}  // namespace bytecheckpoint::format
