// SPDX-License-Identifier: Apache-2.0
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::tensor {

StridedView part_of(StridedView view, const Dims& offsets, const Dims& sizes) {
  for (size_t d = 0; d < sizes.size(); ++d) view.data += offsets[d] * view.strides_bytes[d];
  view.sizes = sizes;
  return view;
}

bool is_row_major(const StridedView& view) {
  int64_t stride = find_dtype(view.dtype)->itemsize_bytes;
  bool in_order = true;
  for (size_t d = view.sizes.size(); d-- > 0;) {
    if (view.sizes[d] == 0) return true;
    in_order = in_order && (view.sizes[d] == 1 || view.strides_bytes[d] == stride);
    stride *= view.sizes[d];
  }
  return in_order;
}

int64_t span_bytes(const StridedView& view) {
  int64_t last = 0;
  for (size_t d = 0; d < view.sizes.size(); ++d) {
    if (view.sizes[d] == 0) return 0;
    last += (view.sizes[d] - 1) * view.strides_bytes[d];
  }
  return last + find_dtype(view.dtype)->itemsize_bytes;
}

namespace {

Dims strides_bytes(const Dims& chunk_sizes, int64_t itemsize_bytes) {
  Dims strides = row_major_strides(chunk_sizes);
  for (int64_t& stride : strides) stride *= itemsize_bytes;
  return strides;
}

}  // namespace

BoxRuns BoxRuns::of_strides(const Dims& sizes, const Dims& file_strides_bytes, int64_t itemsize_bytes,
                            const Dims& memory_strides_bytes) {
  BoxRuns out;
  out.itemsize_bytes_ = out.memory_step_bytes_ = itemsize_bytes;
  for (const int64_t size : sizes) {
    if (size == 0) return out;  // no runs
  }
  std::vector<Dim>& outer = out.outer_;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 1) continue;
    const Dim dim{sizes[d], file_strides_bytes[d], memory_strides_bytes[d]};
    if (!outer.empty() && outer.back().chunk_stride_bytes == dim.size * dim.chunk_stride_bytes &&
        outer.back().memory_stride_bytes == dim.size * dim.memory_stride_bytes) {
      outer.back() = Dim{outer.back().size * dim.size, dim.chunk_stride_bytes, dim.memory_stride_bytes};
    } else {
      outer.push_back(dim);
    }
  }
  out.run_bytes_ = itemsize_bytes;
  if (!outer.empty() && outer.back().chunk_stride_bytes == itemsize_bytes) {
    out.run_bytes_ = outer.back().size * itemsize_bytes;
    out.memory_step_bytes_ = outer.back().memory_stride_bytes;
    outer.pop_back();
  }
  out.num_runs_ = 1;
  for (const Dim& dim : outer) out.num_runs_ *= dim.size;
  return out;
}

BoxRuns::BoxRuns(const Dims& chunk_sizes, const Box& box, int64_t itemsize_bytes, const Dims& memory_strides_bytes)
    : BoxRuns(of_strides(box.sizes, strides_bytes(chunk_sizes, itemsize_bytes), itemsize_bytes, memory_strides_bytes)) {
  if (num_runs_ == 0) return;
  const Dims strides = row_major_strides(chunk_sizes);
  for (size_t d = 0; d < box.num_dims(); ++d) begin_ += box.offsets[d] * strides[d] * itemsize_bytes;
}

BoxRuns::BoxRuns(const StridedView& view)
    : BoxRuns(view.sizes, whole(view.sizes), find_dtype(view.dtype)->itemsize_bytes, view.strides_bytes) {}

int64_t BoxRuns::chunk_offset(int64_t run) const {
  int64_t offset = begin_;
  for (size_t d = outer_.size(); d-- > 0; run /= outer_[d].size) {
    offset += run % outer_[d].size * outer_[d].chunk_stride_bytes;
  }
  return offset;
}

int64_t BoxRuns::memory_offset(int64_t run) const {
  int64_t offset = 0;
  for (size_t d = outer_.size(); d-- > 0; run /= outer_[d].size) {
    offset += run % outer_[d].size * outer_[d].memory_stride_bytes;
  }
  return offset;
}

int64_t BoxRuns::first_run_ending_after(int64_t position) const {
  int64_t low = 0, high = num_runs_;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (chunk_offset(middle) + run_bytes_ > position) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace bytecheckpoint::tensor
