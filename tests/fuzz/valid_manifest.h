// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "csrc/format/manifest/manifest.h"
#include "tests/fuzz/property.h"

namespace bytecheckpoint::fuzz {

/// The properties of a chunk, ours or foreign, that later code relies on without checking again.
inline std::string check_chunk(const format::Manifest& manifest, const format::Item& item, const format::Chunk& chunk) {
  using format::RecordKind;
  const format::Record& record = chunk.record;
  BCP_HOLDS(tensor::is_inside(chunk.box, item.tensor.sizes));
  if (record.kind == RecordKind::kAbsent) {
    BCP_HOLDS(manifest.foreign.has_value());
    return {};
  }
  BCP_HOLDS(record.file < manifest.files.size());
  BCP_HOLDS((record.kind == RecordKind::kBytes) != item.is_tensor);
  int64_t end;
  BCP_HOLDS(base::checked_add(record.offset, record.bytes, &end));
  if (manifest.foreign.has_value()) return {};
  BCP_HOLDS(end <= manifest.files[record.file].bytes && record.offset >= format::kHeaderBytes);
  if (record.kind != RecordKind::kTensor) return {};
  const tensor::DTypeInfo* info = tensor::find_dtype(record.stored_dtype);
  int64_t numel = 0;
  BCP_HOLDS(info != nullptr && tensor::checked_numel(chunk.box.sizes, &numel));
  BCP_HOLDS(numel * info->itemsize_bytes == record.data_bytes && record.data_offset >= record.offset);
  BCP_HOLDS(record.data_offset + record.data_bytes <= record.offset + record.bytes);
  return {};
}

/// The same for a whole manifest.
inline std::string check_manifest(const format::Manifest& manifest) {
  std::vector<bool> taken(manifest.items.size());
  const format::Item* before = nullptr;
  for (const format::Item& item : manifest.items) {
    BCP_HOLDS(before == nullptr || before->fqn < item.fqn);
    BCP_HOLDS(item.ordinal < taken.size() && !taken[item.ordinal]);
    BCP_HOLDS(!item.is_tensor || tensor::find_dtype(item.tensor.dtype) != nullptr);
    BCP_HOLDS(item.is_tensor || (item.chunks.size() == 1 && !item.is_partial));
    BCP_HOLDS(manifest.find(item.fqn) == &item);
    for (const format::Chunk& chunk : item.chunks) BCP_ALL_HOLD(check_chunk(manifest, item, chunk));
    taken[item.ordinal] = true;
    before = &item;
  }
  return {};
}

}  // namespace bytecheckpoint::fuzz
