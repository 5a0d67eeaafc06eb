// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "csrc/base/status.h"
#include "csrc/tensor/box.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::format {

/// Alignment of records, and of the elements in a record, counted from the start of the file. Elements of
/// kLargeDataBytes or more have kLargeDataAlignment.
inline constexpr int64_t kRecordAlignment = 64;
inline constexpr int64_t kLargeDataAlignment = 4096;
inline constexpr int64_t kLargeDataBytes = 1 << 20;

/// Where the elements of a tensor record lie, and how long the record is.
struct RecordExtent {
  int64_t data_offset = 0;  // from the start of the file
  int64_t data_bytes = 0;
  int64_t record_bytes = 0;
};

/// One tensor chunk as a self-contained zip archive, which `torch.load(weights_only=True)` reads at its place in the
/// file. All offsets and lengths are known before the data is; only the tail depends on the CRC of the data:
///
///     record_offset()                                              data_offset()
///     | data.pkl | byteorder | version | header of data/0, padding | data | descriptor, directory |
///     |-------------------------- head() --------------------------|      |-------- tail() -------|
///
/// The layout depends on the arguments alone and never changes, because it is part of the format. Thread-safe, but for
/// `move_to`.
class ZipRecord {
 public:
  /// An object to assign a record to. It has none, so nothing else may be called.
  ZipRecord() = default;
  /// Lays out a record.
  /// \param dtype  A plain dtype of tensor/dtype.h.
  /// \param sizes  Shape of the chunk, in elements.
  /// \param record_offset  Start of the record in the file, a multiple of kRecordAlignment.
  /// \returns kInvalidArgument for another dtype, a shape of more than 2^62 bytes, or one whose strides overflow.
  static base::Result<ZipRecord> layout(tensor::DType dtype, const tensor::Dims& sizes, int64_t record_offset);

  /// Returns only the numbers of `layout`. Takes tens of nanoseconds instead of microseconds.
  static base::Result<RecordExtent> measure(tensor::DType dtype, const tensor::Dims& sizes, int64_t record_offset);

  /// Makes it the same record at another place: a multiple of kLargeDataAlignment away, or of kRecordAlignment if the
  /// data have less than kLargeDataBytes. All its bytes stay the same.
  void move_to(int64_t record_offset) {
    extent_.data_offset += record_offset - record_offset_;
    record_offset_ = record_offset;
  }

  /// The bytes before the data.
  const std::string& head() const { return head_; }
  /// Returns the bytes behind the data.
  /// \param data_crc  CRC-32 of the data.
  std::string tail(uint32_t data_crc) const;

  int64_t data_bytes() const { return extent_.data_bytes; }
  int64_t record_bytes() const { return extent_.record_bytes; }
  int64_t record_offset() const { return record_offset_; }
  int64_t data_offset() const { return extent_.data_offset; }

 private:
  std::string head_;
  std::string tail_;          // with a CRC of zero
  size_t directory_crc_ = 0;  // where in the tail the central directory has the CRC of the data
  int64_t record_offset_ = 0;
  RecordExtent extent_;
};

/// Returns `archive/data.pkl`: the pickle that rebuilds a row-major tensor over the storage "0".
std::string tensor_pickle(const tensor::DTypeInfo& dtype, const tensor::Dims& sizes, int64_t data_bytes);
/// Returns the length of that pickle, without making it.
int64_t tensor_pickle_bytes(const tensor::DTypeInfo& dtype, const tensor::Dims& sizes, int64_t data_bytes);

}  // namespace bytecheckpoint::format
