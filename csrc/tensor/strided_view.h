// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/tensor/box.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::tensor {

/// Host memory of one tensor or a part of it. Owns nothing: whoever makes it keeps the tensor alive.
struct StridedView {
  uint8_t* data = nullptr;  // first element; may be null if there are no elements
  DType dtype = DType::kNone;
  Dims sizes;          // elements
  Dims strides_bytes;  // may be 0 (expanded) or negative
};

/// The part of `view` that begins at `offsets`, which lies in it.
StridedView part_of(StridedView view, const Dims& offsets, const Dims& sizes);

/// Do its elements lie one behind the other in row-major order? True of views without elements.
bool is_row_major(const StridedView& view);

/// From the first element to behind the last one, bytes. Of a view without negative strides.
int64_t span_bytes(const StridedView& view);

/// The bytes of one box of a row-major chunk as an ascending sequence of equally long runs.
///
/// A run is a stretch that is contiguous in the chunk and evenly strided in memory. Dims that are laid out alike on
/// both sides are joined, so a contiguous tensor is one run however many dims it has. Run starts ascend with the run
/// number, because the chunk is row-major; that is what lets a window of the chunk be found by bisection.
class BoxRuns {
 public:
  /// \param chunk_sizes    Shape of the chunk, elements.
  /// \param box            Part of the chunk; must be inside it (checked by the caller with `is_inside`).
  /// \param memory_strides_bytes  One per dim of the box.
  BoxRuns(const Dims& chunk_sizes, const Box& box, int64_t itemsize_bytes, const Dims& memory_strides_bytes);
  /// Of all elements of `view`, in row-major order.
  explicit BoxRuns(const StridedView& view);

  int64_t num_runs() const { return num_runs_; }
  int64_t run_bytes() const { return run_bytes_; }
  /// Bytes between neighbouring elements of a run in memory; the item size if the run is contiguous there too.
  int64_t memory_step_bytes() const { return memory_step_bytes_; }
  int64_t itemsize_bytes() const { return itemsize_bytes_; }
  /// Byte extent of the box in the chunk; empty for a box without elements.
  int64_t begin() const { return begin_; }
  int64_t end() const { return num_runs_ == 0 ? begin_ : chunk_offset(num_runs_ - 1) + run_bytes_; }

  /// Byte offset in the chunk at which a run starts. Ascends with `run`.
  int64_t chunk_offset(int64_t run) const;
  /// Byte offset in memory, from the box's first element, at which a run starts.
  int64_t memory_offset(int64_t run) const;
  /// Number of the first run that ends behind chunk byte `position`; num_runs() if none does.
  int64_t first_run_ending_after(int64_t position) const;

 private:
  struct Dim {
    int64_t size;
    int64_t chunk_stride_bytes;
    int64_t memory_stride_bytes;
  };
  std::vector<Dim> outer_;  // outermost first; the run itself is not in it
  int64_t itemsize_bytes_ = 0;
  int64_t begin_ = 0;
  int64_t num_runs_ = 0;
  int64_t run_bytes_ = 0;
  int64_t memory_step_bytes_ = 0;
};

}  // namespace bytecheckpoint::tensor
