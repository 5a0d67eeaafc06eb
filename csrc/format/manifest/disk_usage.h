// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "csrc/format/manifest/manifest.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::format {

/// What is stored of all items whose names begin alike, and that have one dtype.
struct UsageRow {
  std::string key;                             // the first names of their FQNs
  tensor::DType dtype = tensor::DType::kNone;  // kNone for objects
  int64_t num_items = 0;
  int64_t bytes = 0;  // of elements; of opaque tensors and objects, of their records
};

/// What the data files of a checkpoint hold, in bytes. For a checkpoint of ours everything together is the size of its
/// files; of another writer's files the metadata say only what the rows and `archive_bytes` have.
struct DiskUsage {
  std::vector<UsageRow> rows;  // sorted by key, then by dtype
  int64_t header_bytes = 0;    // headers and trailers of files
  int64_t table_bytes = 0;     // block tables
  int64_t archive_bytes = 0;   // what is around the elements in the records of tensors, with the padding in them
  int64_t padding_bytes = 0;   // between records
};

/// Counts what a manifest says. Bytes that several items share, as views of one storage do, count for the first one.
///
/// \param depth  How many of the names in an FQN, which dots separate, make the key of a row; 0 makes one row a dtype.
/// Pure; O(n log n) in the number of records.
DiskUsage disk_usage(const Manifest& manifest, size_t depth);

}  // namespace bytecheckpoint::format
