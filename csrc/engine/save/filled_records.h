// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/save/file_image.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/format/torch/record_layouts.h"

namespace bytecheckpoint::engine {

/// A record whose bytes are read from elsewhere. Borrows its name and its box.
struct RecordToFill {
  const std::string* fqn;
  const tensor::Box* box;   // no dims for an object
  format::RecordKind kind;  // kTensor: row-major elements of `dtype`; another: `bytes` bytes, as they are
  tensor::DType dtype;      // of a kTensor
  int64_t bytes;            // of another

  /// Returns where it lies in a file, and its data in it, if it begins at `position`. \returns what
  /// `ZipRecord::measure` returns.
  base::Result<format::RecordExtent> extent_at(int64_t position) const;
};

/// Where the bytes of records come from: what was wanted is there when `run` has returned.
struct RecordSource {
  /// Makes the next `run` write bytes [begin, end) of a record, those of its elements if it is a tensor, to `to`.
  std::function<base::Status(size_t record, int64_t begin, int64_t end, uint8_t* to)> want;
  std::function<base::Status()> run;
  int slots_a_run = staging::kSlotsARun;
};

/// Records of which bytes are put into the slots of a file first, in any order, and then get what is around them, and
/// their CRCs:
///
///     |head a|   a   |tail|head b|    b      |tail|head c|                c
///     slots         |                   |                   |
///             wanted       wanted^      limit ^  wanted together, for a run of two slots
///
/// Not thread-safe.
class FilledRecords {
 public:
  /// Called with each record that is complete. `Record::file` is not set.
  using Note = std::function<void(const RecordToFill&, const format::Record&)>;

  /// Lays `records[first]` up to, but not including, `records[behind]` out from `position` of a file on. \returns what
  /// `ZipRecord::measure` returns.
  static base::Result<FilledRecords> lay_out(const std::vector<RecordToFill>& records, size_t first, size_t behind,
                                             int64_t position);

  bool is_done() const { return next_ == behind_; }
  /// Whether nothing can be appended yet, because the next record has its head before `limit`, and no data.
  bool needs_more_than(int64_t limit) const { return is_behind(limit, next_); }
  /// Position behind all records.
  int64_t end() const { return end_; }
  /// Wants the bytes before `limit` that are not there yet; the slots for them are taken. \returns what `want` returns.
  base::Status want_until(int64_t limit, const FileImage& image, const RecordSource& source) const;
  /// Appends what is before `limit`, and was wanted. \returns what `FileImage::append` returns.
  base::Status append_until(int64_t limit, FileImage* image, const Note& note);

 private:
  FilledRecords(const std::vector<RecordToFill>& records, size_t first, size_t behind)
      : records_(records), first_(first), behind_(behind), next_(first) {}
  const format::RecordExtent& extent(size_t record) const { return extents_[record - first_]; }
  int64_t data_end(size_t record) const { return extent(record).data_offset + extent(record).data_bytes; }
  /// Whether nothing of the data of a record is before `limit`. Then its head may wait, too.
  bool is_behind(int64_t limit, size_t record) const { return extent(record).data_offset >= limit && limit < end_; }

  const std::vector<RecordToFill>& records_;
  const size_t first_, behind_;  // of them
  format::RecordLayouts layouts_;
  std::vector<format::RecordExtent> extents_;
  std::vector<int64_t> begins_;
  int64_t end_ = 0;
  size_t next_;       // the first record that is not complete
  uint32_t crc_ = 0;  // of its data, as far as they are appended
};

}  // namespace bytecheckpoint::engine
