// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/zip_record.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "csrc/base/bytes.h"
#include "csrc/base/crc32.h"
#include "csrc/format/archive/zip_headers.h"
#include "csrc/format/archive/zip_layout.h"
#include "csrc/format/pickle/pickle_writer.h"

namespace bytecheckpoint::format {
namespace {

using namespace zip;  // NOLINT: the numbers of the format

constexpr std::string_view kSmallNames[3] = {"archive/data.pkl", "archive/byteorder", "archive/version"};
constexpr std::string_view kSmallContents[3] = {{}, "little", "3\n"};  // the first depends on the tensor: its pickle
constexpr std::string_view kDataName = "archive/data/0";

constexpr uint16_t kFlagDescriptor = 1 << 3;

/// A limit that leaves room for offset and padding below the limit of int64.
constexpr int64_t kMaxDataBytes = int64_t{1} << 62;

/// Returns whether a plain zip field cannot hold this size. The central directory then also starts beyond 4 GiB.
bool needs_zip64(int64_t data_bytes) {
  return data_bytes >= 0xFFFF0000;
}

constexpr int64_t kCentralEntryBytes = 46;
constexpr int64_t kExtraHeadBytes = 4;
constexpr int64_t kZip64ExtraBytes = kExtraHeadBytes + int64_t{2} * 8;

constexpr int64_t names_bytes() {
  size_t bytes = kDataName.size();
  for (const std::string_view name : kSmallNames) bytes += name.size();
  return static_cast<int64_t>(bytes);
}

/// Length of a head, without the tensor's pickle and without the filling of the last extra field.
constexpr int64_t kFixedHeadBytes = 4 * kLocalHeaderBytes + names_bytes() +
                                    static_cast<int64_t>(kSmallContents[1].size() + kSmallContents[2].size()) +
                                    kExtraHeadBytes;
/// Length of a tail: descriptor, central directory, end records.
constexpr int64_t kPlainTailBytes = 16 + 4 * kCentralEntryBytes + names_bytes() + 22;
constexpr int64_t kZip64TailBytes = kPlainTailBytes + 8 + kZip64ExtraBytes + 56 + 20;

std::string zip64_extra(uint64_t bytes) {
  base::ByteWriter out;
  out.u16(kExtraZip64);
  out.u16(16);
  out.u64(bytes);
  out.u64(bytes);
  return out.take();
}

int64_t storage_elements(const tensor::DTypeInfo& dtype, int64_t data_bytes) {
  return dtype.typed_storage != nullptr ? data_bytes / dtype.itemsize_bytes : data_bytes;
}

/// Returns how many bytes of a tensor's pickle depend on its shape.
int64_t shape_bytes(const tensor::DTypeInfo& dtype, const tensor::Dims& sizes, int64_t data_bytes) {
  return PickleWriter::integer_bytes(storage_elements(dtype, data_bytes)) + PickleWriter::int_tuple_bytes(sizes) +
         PickleWriter::int_tuple_bytes(tensor::row_major_strides(sizes));
}

/// Returns whether the strides of a shape without elements fit in int64. torch has no tensor whose strides overflow, so
/// no reader could load such a record.
bool has_strides(const tensor::Dims& sizes) {
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 1;) {
    if (!base::checked_mul(stride, std::max<int64_t>(sizes[d], 1), &stride)) return false;
  }
  return true;
}

/// What a tail says of an entry before the data: CRC and length of its content, and where its local header begins.
struct SmallEntry {
  uint32_t crc, bytes, offset;
};
using SmallEntries = std::array<SmallEntry, 3>;

/// Where the descriptor, with which a tail begins, has the CRC of the data; and where a central entry has one.
constexpr size_t kDescriptorCrc = 4, kCentralEntryCrc = 16;

/// Returns the bytes behind the data, with zeros where the CRC of the data belongs.
/// \param data_entry  Where the local header of the data begins.
/// \param directory_crc  Receives where in the tail the central directory has that CRC.
std::string tail_of(size_t head_bytes, int64_t data_bytes, const SmallEntries& small, uint32_t data_entry,
                    size_t* directory_crc) {
  const bool zip64 = needs_zip64(data_bytes);
  const auto bytes = static_cast<uint64_t>(data_bytes);
  base::ByteWriter out;
  out.u32(kDataDescriptor);
  out.u32(0);
  for (int field = 0; field < 2; ++field) {
    if (zip64) {
      out.u64(bytes);
    } else {
      out.u32(static_cast<uint32_t>(bytes));
    }
  }

  const uint64_t directory_offset = head_bytes + bytes + out.size();
  const size_t directory_begin = out.size();
  for (int i = 0; i < 3; ++i) {
    write_central_entry({kSmallNames[i], kVersionPlain, 0, small[i].crc, small[i].bytes}, "", small[i].offset, &out);
  }
  *directory_crc = out.size() + kCentralEntryCrc;
  const uint32_t plain_bytes = zip64 ? kInZip64 : static_cast<uint32_t>(bytes);
  write_central_entry({kDataName, zip64 ? kVersionZip64 : kVersionPlain, kFlagDescriptor, 0, plain_bytes},
                      zip64 ? zip64_extra(bytes) : std::string(), data_entry, &out);
  const uint64_t directory_bytes = out.size() - directory_begin;

  constexpr uint16_t kEntries = 4;
  if (zip64) {
    const uint64_t end_offset = directory_offset + directory_bytes;
    out.u32(kZip64End);
    out.u64(44);  // length of the rest of this record
    out.u16(kVersionZip64);
    out.u16(kVersionZip64);
    out.u32(0);
    out.u32(0);
    out.u64(kEntries);
    out.u64(kEntries);
    out.u64(directory_bytes);
    out.u64(directory_offset);
    out.u32(kZip64Locator);
    out.u32(0);
    out.u64(end_offset);
    out.u32(1);
  }
  write_end(kEntries, static_cast<uint32_t>(directory_bytes),
            zip64 ? kInZip64 : static_cast<uint32_t>(directory_offset), &out);
  return out.take();
}

}  // namespace

std::string tensor_pickle(const tensor::DTypeInfo& dtype, const tensor::Dims& sizes, int64_t data_bytes) {
  PickleWriter pickle(2);
  const bool typed = dtype.typed_storage != nullptr;
  pickle.global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
  pickle.mark();
  pickle.mark();
  pickle.string("storage");
  if (typed) {
    pickle.global("torch", dtype.typed_storage);
  } else {
    pickle.global("torch.storage", "UntypedStorage");
  }
  pickle.string("0");
  pickle.string("cpu");
  pickle.integer(storage_elements(dtype, data_bytes));
  pickle.tuple_from_mark();
  pickle.persistent_id();
  pickle.integer(0);  // storage offset
  pickle.int_tuple(sizes);
  pickle.int_tuple(tensor::row_major_strides(sizes));
  pickle.boolean(false);  // requires_grad
  pickle.global("collections", "OrderedDict");
  pickle.empty_tuple();
  pickle.reduce();  // backward hooks: none
  if (!typed) pickle.global("torch", dtype.name);
  pickle.tuple_from_mark();
  pickle.reduce();
  return pickle.finish();
}

int64_t tensor_pickle_bytes(const tensor::DTypeInfo& dtype, const tensor::Dims& sizes, int64_t data_bytes) {
  // Length for each dtype, without the bytes that depend on the shape.
  static const std::array<int64_t, tensor::kLastDType + 1> fixed_bytes = [] {
    std::array<int64_t, tensor::kLastDType + 1> bytes{};
    for (uint8_t code = 1; code <= tensor::kLastDType; ++code) {
      const tensor::DTypeInfo& info = *tensor::find_dtype(code);
      if (!info.is_plain()) continue;
      const auto scalar_bytes = static_cast<int64_t>(tensor_pickle(info, {}, info.itemsize_bytes).size());
      bytes[code] = scalar_bytes - shape_bytes(info, {}, info.itemsize_bytes);
    }
    return bytes;
  }();
  return fixed_bytes[static_cast<size_t>(dtype.dtype)] + shape_bytes(dtype, sizes, data_bytes);
}

base::Result<RecordExtent> ZipRecord::measure(tensor::DType dtype, const tensor::Dims& sizes, int64_t record_offset) {
  const tensor::DTypeInfo* info = tensor::find_plain_dtype(dtype);
  RecordExtent extent;
  if (info == nullptr || !tensor::checked_numel(sizes, &extent.data_bytes) ||
      !base::checked_mul(extent.data_bytes, info->itemsize_bytes, &extent.data_bytes) ||
      extent.data_bytes > kMaxDataBytes || (extent.data_bytes == 0 && !has_strides(sizes))) {
    return base::Status::make(base::Code::kInvalidArgument,
                              base::text("tensor record: dtype code ", static_cast<int>(dtype), " with shape ",
                                         tensor::to_text(sizes), " cannot be stored"));
  }
  const bool zip64 = needs_zip64(extent.data_bytes);
  const int64_t unpadded = record_offset + kFixedHeadBytes + tensor_pickle_bytes(*info, sizes, extent.data_bytes) +
                           (zip64 ? kZip64ExtraBytes : 0);
  extent.data_offset =
      base::align_up(unpadded, extent.data_bytes >= kLargeDataBytes ? kLargeDataAlignment : kRecordAlignment);
  extent.record_bytes =
      extent.data_offset - record_offset + extent.data_bytes + (zip64 ? kZip64TailBytes : kPlainTailBytes);
  return extent;
}

base::Result<ZipRecord> ZipRecord::layout(tensor::DType dtype, const tensor::Dims& sizes, int64_t record_offset) {
  ZipRecord record;
  SmallEntries small;
  BCP_ASSIGN_OR_RETURN(record.extent_, measure(dtype, sizes, record_offset));
  record.record_offset_ = record_offset;
  const std::string pickle = tensor_pickle(*tensor::find_plain_dtype(dtype), sizes, record.data_bytes());
  const std::string_view contents[3] = {pickle, kSmallContents[1], kSmallContents[2]};

  base::ByteWriter out;
  for (int i = 0; i < 3; ++i) {
    small[i] = {base::crc32(0, contents[i].data(), contents[i].size()), static_cast<uint32_t>(contents[i].size()),
                static_cast<uint32_t>(out.size())};
    write_local_header({kSmallNames[i], kVersionPlain, 0, small[i].crc, small[i].bytes}, "", &out);
    out.raw(contents[i]);
  }

  const bool zip64 = needs_zip64(record.data_bytes());
  std::string extra = zip64 ? zip64_extra(0) : std::string();
  const size_t data_entry = out.size();
  const int64_t unpadded =
      record_offset + static_cast<int64_t>(data_entry + kLocalHeaderBytes + kDataName.size() + extra.size());
  extra += padding_to(unpadded, record.data_bytes() >= kLargeDataBytes ? kLargeDataAlignment : kRecordAlignment);
  // CRC and sizes of the data follow behind it. In a zip64 archive these fields refer to the extra field.
  write_local_header({kDataName, zip64 ? kVersionZip64 : kVersionPlain, kFlagDescriptor, 0, zip64 ? kInZip64 : 0},
                     extra, &out);
  record.head_ = out.take();
  record.tail_ = tail_of(record.head_.size(), record.data_bytes(), small, static_cast<uint32_t>(data_entry),
                         &record.directory_crc_);
  return record;
}

std::string ZipRecord::tail(uint32_t data_crc) const {
  std::string tail = tail_;
  std::memcpy(&tail[kDescriptorCrc], &data_crc, sizeof data_crc);
  std::memcpy(&tail[directory_crc_], &data_crc, sizeof data_crc);
  return tail;
}

}  // namespace bytecheckpoint::format
