// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/tensor/box.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::tensor {

/// Host memory of a tensor, or of a part of one. It owns nothing: whoever makes a view keeps the tensor alive.
struct StridedView {
  uint8_t* data = nullptr;  // first element; may be null if there are no elements
  DType dtype = DType::kNone;
  Dims sizes;          // elements
  Dims strides_bytes;  // may be 0 (expanded) or negative
};

/// Returns the part of `view` that begins at `offsets` and has `sizes` elements. It must lie inside the view.
StridedView part_of(StridedView view, const Dims& offsets, const Dims& sizes);

/// Returns whether the elements lie in row-major order without gaps. A view without elements counts as row-major.
bool is_row_major(const StridedView& view);

/// Returns the number of bytes from the first element to the end of the last one, gaps included; 0 for a view without
/// elements. No stride may be negative.
int64_t span_bytes(const StridedView& view);

/// The bytes of one box of a row-major chunk, as a sequence of equally long runs.
///
/// A run is contiguous in the chunk (in the file) and evenly strided in memory. A box of 2 x 3 elements at [1, 2] in a
/// chunk of 4 x 6 is two runs:
///
///     . . . . . .
///     . . a b c .      run 0: elements 8 to 10 of the chunk
///     . . d e f .      run 1: elements 14 to 16
///     . . . . . .
///
/// Dims that are laid out alike in chunk and memory are joined, so a contiguous tensor is one run, however many dims it
/// has. The chunk is row-major, so the runs begin at ascending offsets, and a binary search finds the runs in a part of
/// the chunk.
/// Immutable, so thread-safe. Offsets cost O(ndim), searches O(ndim * log(runs)).
class BoxRuns {
 public:
  /// \param chunk_sizes  Shape of the chunk, in elements.
  /// \param box  Part of the chunk. The caller has checked with `is_inside` that it lies in it.
  /// \param memory_strides_bytes  Strides of the memory of the box, one per dim; may be 0 or negative.
  BoxRuns(const Dims& chunk_sizes, const Box& box, int64_t itemsize_bytes, const Dims& memory_strides_bytes);
  /// No runs.
  BoxRuns() = default;
  /// The runs of all elements of `view`, taken as a row-major chunk of their own.
  explicit BoxRuns(const StridedView& view);
  /// The runs of a box whose elements are evenly spaced in the file. Offsets in the chunk count from its first element.
  /// \param sizes  Elements of the box, dims in the order of the file: a stride is at least as long as all that the
  /// dims behind it span.
  /// \param file_strides_bytes, memory_strides_bytes  One per dim. Those of the memory may be 0 or negative.
  static BoxRuns of_strides(const Dims& sizes, const Dims& file_strides_bytes, int64_t itemsize_bytes,
                            const Dims& memory_strides_bytes);

  int64_t num_runs() const { return num_runs_; }
  int64_t run_bytes() const { return run_bytes_; }
  /// Bytes from one element of a run to the next in memory; the item size if the run is contiguous there, too.
  int64_t memory_step_bytes() const { return memory_step_bytes_; }
  int64_t itemsize_bytes() const { return itemsize_bytes_; }
  /// The bytes of the chunk from the first to behind the last run; empty for a box without elements.
  int64_t begin() const { return begin_; }
  int64_t end() const { return num_runs_ == 0 ? begin_ : chunk_offset(num_runs_ - 1) + run_bytes_; }
  /// Whether nothing lies between the runs in the chunk.
  bool lie_together() const { return num_runs_ * run_bytes_ == end() - begin_; }

  /// Returns the byte offset in the chunk at which a run starts. It ascends with `run`.
  int64_t chunk_offset(int64_t run) const;
  /// Returns the byte offset at which a run starts in memory, counted from the first element of the box.
  int64_t memory_offset(int64_t run) const;
  /// Returns the number of the first run that ends behind byte `position` of the chunk; num_runs() if there is none.
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
