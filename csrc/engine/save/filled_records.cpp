// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/save/filled_records.h"

#include <algorithm>

#include "csrc/base/crc32.h"

namespace bytecheckpoint::engine {

using base::Status;
using format::RecordKind;

base::Result<format::RecordExtent> RecordToFill::extent_at(int64_t position) const {
  if (kind == RecordKind::kTensor) return format::ZipRecord::measure(dtype, box->sizes, position);
  return format::RecordExtent{position, bytes, bytes};
}

base::Result<FilledRecords> FilledRecords::lay_out(const std::vector<RecordToFill>& records, size_t first,
                                                   size_t behind, int64_t position) {
  FilledRecords out(records, first, behind);
  out.end_ = position;
  for (size_t r = first; r < behind; ++r) {
    const int64_t begin = base::align_up(out.end_, format::kRecordAlignment);
    BCP_ASSIGN_OR_RETURN(const format::RecordExtent extent, records[r].extent_at(begin));
    out.begins_.push_back(begin);
    out.extents_.push_back(extent);
    out.end_ = begin + extent.record_bytes;
  }
  return out;
}

Status FilledRecords::want_until(int64_t limit, const FileImage& image, const RecordSource& source) const {
  for (size_t r = next_; r < behind_ && extent(r).data_offset < limit; ++r) {
    const int64_t data = extent(r).data_offset, end = std::min(limit, data_end(r));
    for (int64_t at = std::max(data, image.position()), next; at < end; at = next) {
      next = std::min(end, image.slot_end(at));
      BCP_RETURN_IF_ERROR(source.want(r, at - data, next - data, image.memory(at)));
    }
  }
  return Status::ok();
}

Status FilledRecords::append_until(int64_t limit, FileImage* image, const Note& note) {
  for (; !is_done() && !is_behind(limit, next_); ++next_) {
    const RecordToFill& record = records_[next_];
    const format::ZipRecord* zip = nullptr;
    if (record.kind == RecordKind::kTensor) {
      BCP_ASSIGN_OR_RETURN(zip, layouts_.find(record.dtype, record.box->sizes, begins_[next_ - first_]));
    }
    if (image->position() <= begins_[next_ - first_]) {
      BCP_RETURN_IF_ERROR(image->pad_to(format::kRecordAlignment));
      if (zip != nullptr) BCP_RETURN_IF_ERROR(image->append(zip->head()));
    }
    const int64_t bytes = std::min(limit, data_end(next_)) - image->position();
    if (bytes > 0) {
      uint32_t crc = 0;
      BCP_RETURN_IF_ERROR(image->append_in_place(bytes, &crc));
      crc_ = base::crc32_combine(crc_, crc, static_cast<uint64_t>(bytes));
    }
    if (data_end(next_) > limit) break;
    if (zip != nullptr) BCP_RETURN_IF_ERROR(image->append(zip->tail(crc_)));
    crc_ = 0;
    const format::RecordExtent& placed = extent(next_);
    note(record, zip != nullptr ? format::Record{record.kind, record.dtype, 0, begins_[next_ - first_],
                                                 placed.record_bytes, placed.data_offset, placed.data_bytes}
                                : format::Record{record.kind, tensor::DType::kNone, 0, begins_[next_ - first_],
                                                 placed.record_bytes, 0, 0});
  }
  return Status::ok();
}

}  // namespace bytecheckpoint::engine
