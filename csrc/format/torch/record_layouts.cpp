// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/record_layouts.h"

#include <utility>

#include "csrc/base/index_table.h"

namespace bytecheckpoint::format {

base::Result<const ZipRecord*> RecordLayouts::find(tensor::DType dtype, const tensor::Dims& sizes,
                                                   int64_t record_offset) {
  BCP_ASSIGN_OR_RETURN(const RecordExtent extent, ZipRecord::measure(dtype, sizes, record_offset));
  const int64_t remainder =
      record_offset % (extent.data_bytes < kLargeDataBytes ? kRecordAlignment : kLargeDataAlignment);
  uint64_t hash = base::spread_hash(static_cast<uint64_t>(dtype) + static_cast<uint64_t>(remainder));
  for (const int64_t size : sizes) hash = base::spread_hash(hash + static_cast<uint64_t>(size));
  if (known_.empty()) known_.resize(kNumKnown);
  Known& known = known_[hash % kNumKnown];
  if (known.dtype == dtype && known.remainder == remainder && known.sizes == sizes) {
    known.record.move_to(record_offset);
    return &known.record;
  }
  known.dtype = tensor::DType::kNone;
  BCP_ASSIGN_OR_RETURN(known.record, ZipRecord::layout(dtype, sizes, record_offset));
  known.dtype = dtype;
  known.sizes = sizes;
  known.remainder = remainder;
  return &known.record;
}

}  // namespace bytecheckpoint::format
