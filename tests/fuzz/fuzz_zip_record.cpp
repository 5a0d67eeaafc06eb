// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/zip_record.h"

#include "csrc/base/bytes.h"
#include "csrc/base/crc32.h"
#include "csrc/format/torch/torch_archive.h"
#include "tests/fuzz/in_memory.h"
#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"

namespace bytecheckpoint::fuzz {
namespace {

constexpr int64_t kMostData = 64 << 10;

/// The reader for torch's archives reads the record back, at the right offset and with its elements.
std::string check_record(const format::ZipRecord& record, tensor::DType dtype, const tensor::Dims& sizes) {
  const std::string content(static_cast<size_t>(record.data_bytes()), 'x');
  const uint32_t crc = base::crc32(0, content.data(), content.size());
  const std::string whole = record.head() + content + record.tail(crc);
  BCP_HOLDS(static_cast<int64_t>(whole.size()) == record.record_bytes());
  BCP_HOLDS(record.record_offset() + static_cast<int64_t>(record.head().size()) == record.data_offset());
  const auto read = format::read_tensor_archive(record.record_bytes(), in_memory(whole));
  BCP_HOLDS(read.is_ok() && read.value().has_value());
  const format::ArchivedTensor& found = *read.value();
  BCP_HOLDS(found.dtype == dtype && found.sizes == sizes && found.storage_crc == crc);
  BCP_HOLDS(found.storage_offset + record.record_offset() == record.data_offset());
  return {};
}

}  // namespace

/// Any dtype, sizes and offset: dtype (u8), offset in units of the record alignment (u32), then sizes (i64 each).
std::string zip_record(std::string_view bytes) {
  base::ByteReader in(bytes);
  const auto dtype = static_cast<tensor::DType>(in.u8());
  const int64_t offset = in.u32() * format::kRecordAlignment;
  tensor::Dims sizes;
  while (in.remaining() >= 8 && sizes.size() < 255) sizes.push_back(in.i64());
  PeakMemory memory(bytes.size());
  const auto record = format::ZipRecord::layout(dtype, sizes, offset);
  const auto extent = format::ZipRecord::measure(dtype, sizes, offset);
  BCP_ALL_HOLD(memory.stop());
  BCP_HOLDS(record.is_ok() == extent.is_ok());
  if (!record.is_ok()) {
    BCP_HOLDS(record.status().code() == base::Code::kInvalidArgument);
    return {};
  }
  BCP_HOLDS(extent.value().data_offset == record.value().data_offset());
  BCP_HOLDS(extent.value().data_bytes == record.value().data_bytes());
  BCP_HOLDS(extent.value().record_bytes == record.value().record_bytes());
  BCP_HOLDS(record.value().data_offset() % format::kRecordAlignment == 0);
  if (record.value().data_bytes() > kMostData) return {};
  return check_record(record.value(), dtype, sizes);
}

}  // namespace bytecheckpoint::fuzz
