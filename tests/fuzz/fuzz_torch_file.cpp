// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/torch_file.h"

#include "csrc/format/torch/builtin_archive.h"
#include "tests/fuzz/in_memory.h"
#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"

namespace bytecheckpoint::fuzz {
namespace {

/// See `read_torch_file`.
constexpr int64_t kTimesOfAFile = 1024;
constexpr int64_t kFreeBytesOfAFile = 4 << 20;

}  // namespace

/// Every element that a record names lies in the file, and every text in the texts.
std::string torch_file(std::string_view bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  PeakMemory memory(bytes.size(), kTimesOfAFile, kFreeBytesOfAFile);
  const auto read = format::read_torch_file(size, in_memory(bytes));
  BCP_ALL_HOLD(memory.stop());
  if (!read.is_ok()) {
    const base::Code code = read.status().code();
    BCP_HOLDS(code == base::Code::kCorrupt || code == base::Code::kUnsupported);
    return {};
  }
  const format::Manifest& manifest = read.value();
  const format::ForeignMeta& foreign = *manifest.foreign;
  for (const format::Item& item : manifest.items) {
    BCP_HOLDS(item.chunks.size() == 1);
    const format::Record& record = item.chunks[0].record;
    if (record.kind == format::RecordKind::kInline || record.kind == format::RecordKind::kRefused) {
      BCP_HOLDS(record.data_offset + record.data_bytes <= static_cast<int64_t>(foreign.texts.size()));
      if (record.kind == format::RecordKind::kRefused) continue;
      const std::string archive = format::archive_of_pickle(foreign.text_of(record));
      BCP_HOLDS(static_cast<int64_t>(archive.size()) == record.bytes);
      continue;
    }
    BCP_HOLDS(item.is_tensor && tensor::find_plain_dtype(item.tensor.dtype) != nullptr);
    BCP_HOLDS(record.offset >= 0 && record.bytes >= 0 && record.bytes <= size - record.offset);
    if (record.kind == format::RecordKind::kTensor) continue;
    BCP_HOLDS(record.kind == format::RecordKind::kStrided);
    const tensor::Dims& strides = foreign.strides.at(static_cast<size_t>(record.data_bytes));
    int64_t last = 0;
    for (size_t d = 0; d < strides.size(); ++d) last += (item.tensor.sizes[d] - 1) * strides[d];
    BCP_HOLDS((last + 1) * tensor::find_dtype(item.tensor.dtype)->itemsize_bytes == record.bytes);
  }
  return {};
}

}  // namespace bytecheckpoint::fuzz
