// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/torch/zip_record.h"
#include "csrc/tensor/dims.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::format {

/// Lays out records as `ZipRecord::layout` does, and keeps the last layouts: most tensors of a state have one of a few
/// shapes, and a state may have a million of them. Not thread-safe.
class RecordLayouts {
 public:
  /// See `ZipRecord::layout`. \returns a record that stays valid until the next call.
  base::Result<const ZipRecord*> find(tensor::DType dtype, const tensor::Dims& sizes, int64_t record_offset);

 private:
  struct Known {
    tensor::DType dtype = tensor::DType::kNone;  // kNone: nothing is kept here
    tensor::Dims sizes;
    int64_t remainder = 0;  // of the record's offset; records with the same one are alike
    ZipRecord record;
  };
  static constexpr size_t kNumKnown = 64;  // a power of two

  std::vector<Known> known_;  // by a hash of what is asked for
};

}  // namespace bytecheckpoint::format
