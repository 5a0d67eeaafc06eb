// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest/disk_usage.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/format/data_file.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::format {
namespace {

std::string_view first_names(std::string_view fqn, size_t depth) {
  size_t end = 0;
  for (size_t i = 0; i < depth; ++i) {
    end = fqn.find('.', i == 0 ? 0 : end + 1);
    if (end == std::string_view::npos) return fqn;
  }
  return fqn.substr(0, end);
}

/// Adds what a hostile manifest may say, too.
void add(int64_t bytes, int64_t* sum) {
  if (!base::checked_add(*sum, bytes, sum)) *sum = INT64_MAX;
}

bool has_bytes(const Record& record) {
  return record.bytes > 0 && record.kind != RecordKind::kAbsent && record.kind != RecordKind::kRefused &&
         record.kind != RecordKind::kInline;
}

/// Bytes of elements in a record; all of it if it is not of plain elements.
int64_t payload_of(const Item& item, const Chunk& chunk) {
  const Record& record = chunk.record;
  if (record.kind == RecordKind::kTensor) return record.data_bytes;
  const tensor::DTypeInfo* plain = item.is_tensor ? tensor::find_plain_dtype(item.tensor.dtype) : nullptr;
  int64_t numel = 0;
  if (record.kind == RecordKind::kOpaque || plain == nullptr || !tensor::checked_numel(chunk.box.sizes, &numel)) {
    return record.bytes;
  }
  // Of a view that repeats elements, fewer are stored.
  return numel > record.bytes / plain->itemsize_bytes ? record.bytes : numel * plain->itemsize_bytes;
}

/// Returns the bytes of the block table of a file of ours. Each block adds its own bytes and 4 of the table, and only
/// the last block may be shorter.
int64_t table_bytes(int64_t file_bytes) {
  const int64_t before_trailer = std::max<int64_t>(file_bytes - kDataTrailerBytes, 0);
  return 4 * (before_trailer / (kBlockBytes + 4) + (before_trailer % (kBlockBytes + 4) != 0 ? 1 : 0));
}

}  // namespace

DiskUsage disk_usage(const Manifest& manifest, size_t depth) {
  DiskUsage out;
  std::map<std::pair<std::string_view, tensor::DType>, UsageRow> rows;
  std::set<std::tuple<uint32_t, int64_t, int64_t>> seen;  // places of records
  int64_t record_bytes = 0;
  const bool may_share = manifest.foreign.has_value();  // no save of ours writes a record that two chunks name
  for (const Item& item : manifest.items) {
    const tensor::DType dtype = item.is_tensor ? item.tensor.dtype : tensor::DType::kNone;
    UsageRow& row = rows[{first_names(item.fqn, depth), dtype}];
    ++row.num_items;
    for (const Chunk& chunk : item.chunks) {
      const Record& record = chunk.record;
      if (!has_bytes(record)) continue;
      if (may_share && !seen.emplace(record.file, record.offset, record.data_offset).second) continue;
      const int64_t payload = payload_of(item, chunk);
      add(payload, &row.bytes);
      add(record.bytes, &record_bytes);
      add(std::max<int64_t>(record.bytes - payload, 0), &out.archive_bytes);
    }
  }
  for (auto& [key, row] : rows) {
    row.key = key.first;
    row.dtype = key.second;
    out.rows.push_back(std::move(row));
  }
  if (manifest.foreign.has_value()) return out;
  int64_t file_bytes = 0;
  for (const FileEntry& file : manifest.files) {
    add(file.bytes, &file_bytes);
    add(kHeaderBytes + kDataTrailerBytes, &out.header_bytes);
    add(table_bytes(file.bytes), &out.table_bytes);
  }
  out.padding_bytes = file_bytes;
  for (const int64_t known : {out.header_bytes, out.table_bytes, record_bytes}) {
    out.padding_bytes = std::max<int64_t>(out.padding_bytes - known, 0);
  }
  return out;
}

}  // namespace bytecheckpoint::format
