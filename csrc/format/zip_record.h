// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "csrc/base/status.h"
#include "csrc/tensor/box.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::format {

/// Where a record starts and where its tensor data starts, counted from the start of the file.
inline constexpr int64_t kRecordAlignment = 64;
inline constexpr int64_t kLargeDataAlignment = 4096;
inline constexpr int64_t kLargeDataBytes = 1 << 20;

/// Where a tensor record lies and how long it is.
struct RecordExtent {
  int64_t data_offset = 0;  // from the start of the file
  int64_t data_bytes = 0;
  int64_t record_bytes = 0;
};

/// One tensor chunk as a self-contained zip archive, which `torch.load(weights_only=True)` reads at its place in the
/// file. Its length is known before its data, because the CRC stands behind the data:
///
///     [head: three small entries, local header of data/0 padded to the alignment][data][tail: descriptor, directory]
///
/// Pure; a layout is the same for the same arguments, for ever: it is part of the format.
class ZipRecord {
 public:
  /// \param dtype          In the table of tensor/dtype.h.
  /// \param sizes          Shape of the chunk, elements.
  /// \param record_offset  Start of the record in the file, a multiple of kRecordAlignment.
  /// \returns kInvalidArgument for an unknown dtype or a shape whose bytes (2^62 at most) or strides overflow.
  static base::Result<ZipRecord> layout(tensor::DType dtype, const tensor::Dims& sizes, int64_t record_offset);

  /// The numbers of `layout` without its text: tens of nanoseconds instead of microseconds.
  static base::Result<RecordExtent> measure(tensor::DType dtype, const tensor::Dims& sizes, int64_t record_offset);

  const std::string& head() const { return head_; }
  /// \param data_crc  CRC-32 of the data.
  std::string tail(uint32_t data_crc) const;

  int64_t data_bytes() const { return extent_.data_bytes; }
  int64_t record_bytes() const { return extent_.record_bytes; }
  int64_t record_offset() const { return record_offset_; }
  int64_t data_offset() const { return extent_.data_offset; }

 private:
  ZipRecord() = default;

  std::string head_;
  int64_t data_entry_offset_ = 0;  // of the local header of data/0, from the start of the record
  int64_t record_offset_ = 0;
  RecordExtent extent_;
  uint32_t small_crc_[3] = {0, 0, 0};
  uint32_t small_offset_[3] = {0, 0, 0};
  uint32_t small_bytes_[3] = {0, 0, 0};
};

/// The pickle that rebuilds a row-major tensor over storage "0": `archive/data.pkl`.
std::string tensor_pickle(const tensor::DTypeInfo& dtype, const tensor::Dims& sizes, int64_t data_bytes);
/// Its length.
int64_t tensor_pickle_bytes(const tensor::DTypeInfo& dtype, const tensor::Dims& sizes, int64_t data_bytes);

}  // namespace bytecheckpoint::format
