// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/dequantize.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::staging {
namespace {

/// A tile that is turned: few enough lines that what is read and written stays in the first cache, and enough that a
/// cache line is written whole.
constexpr int64_t kTileLines = 64;
constexpr int64_t kTileCodes = 64;

/// Writes tile[l][k] to `to` + k * memory_stride, element l.
template <class Value>
void turn(const uint8_t* tile, int64_t lines, int64_t codes, uint8_t* to, int64_t memory_stride) {
  for (int64_t k = 0; k < codes; ++k) {
    uint8_t* row = to + k * memory_stride;
    for (int64_t l = 0; l < lines; ++l) {
      std::memcpy(row + l * static_cast<int64_t>(sizeof(Value)),
                  tile + (l * kTileCodes + k) * static_cast<int64_t>(sizeof(Value)), sizeof(Value));
    }
  }
}

int64_t divided_up(int64_t a, int64_t b) {
  return a <= 0 ? 0 : (a + b - 1) / b;
}

}  // namespace

Dequantizer::Dequantizer(CodeLayout layout, const WantedCodes& wanted)
    : layout_(std::move(layout)),
      first_(wanted.first),
      memory_(wanted.memory),
      itemsize_(tensor::find_dtype(layout_.kind.values)->itemsize_bytes) {
  for (size_t d = 0; d < wanted.sizes.size(); ++d) {
    const Dim dim{wanted.sizes[d], wanted.strides[d], wanted.memory_strides[d]};
    if (dim.size == 0) num_lines_ = 0;
    if (dim.size <= 1) continue;
    if (!outer_.empty() && outer_.back().stride == dim.size * dim.stride &&
        outer_.back().memory_stride == dim.size * dim.memory_stride) {
      outer_.back() = {outer_.back().size * dim.size, dim.stride, dim.memory_stride};
    } else {
      outer_.push_back(dim);
    }
  }
  if (!outer_.empty()) {
    line_ = outer_.back();
    outer_.pop_back();
  }
  for (const Dim& dim : outer_) num_lines_ *= dim.size;
  if (num_lines_ == 0) return;
  const auto is_single = [&](const CodeLayout::Dim& dim) {
    if (dim.size == 1) base_scale_ += (dim.offset / dim.block - dim.scale_offset) * dim.scale_stride;
    return dim.size == 1;
  };
  layout_.dims.erase(std::remove_if(layout_.dims.begin(), layout_.dims.end(), is_single), layout_.dims.end());
  for (const CodeLayout::Dim& dim : layout_.dims) codes_per_scale_ *= std::min(dim.block, dim.size);
  for (size_t d = 0; d < layout_.dims.size(); ++d) {
    const CodeLayout::Dim& dim = layout_.dims[d];
    if (line_.stride % dim.stride != 0 || line_.stride / dim.stride >= dim.size) continue;
    step_dim_ = d;
    step_ = line_.stride / dim.stride;
    break;
  }
}

int64_t Dequantizer::line_begin(int64_t line, int64_t* memory_offset) const {
  int64_t code = first_;
  *memory_offset = 0;
  for (size_t d = outer_.size(); d-- > 0; line /= outer_[d].size) {
    const int64_t index = line % outer_[d].size;
    code += index * outer_[d].stride;
    *memory_offset += index * outer_[d].memory_stride;
  }
  return code;
}

int64_t Dequantizer::first_line_ending_after(int64_t code) const {
  int64_t low = 0, high = num_lines_, unused;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (line_begin(middle, &unused) + (line_.size - 1) * line_.stride >= code) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

void Dequantizer::scatter(const uint8_t* window, int64_t begin, int64_t end, const uint8_t* scales,
                          ValueTables* tables) const {
  const int64_t per_byte = layout_.kind.codes_per_byte();
  const Window there{window, begin * per_byte, end * per_byte, scales, tables};
  tables->use(layout_.kind, codes_per_scale_);
  const bool is_turned =
      line_.memory_stride != itemsize_ && !outer_.empty() && outer_.back().memory_stride == itemsize_;
  int64_t unused;
  for (int64_t line = first_line_ending_after(there.begin); line < num_lines_;) {
    const int64_t first = line_begin(line, &unused);
    if (first >= there.end) return;
    int64_t count = 1;
    if (is_turned) count = std::min(kTileLines, outer_.back().size - line % outer_.back().size);
    const int64_t last = first + (count - 1) * (is_turned ? outer_.back().stride : 0);
    const int64_t part = count == 1 ? line_.size : kTileCodes;
    for (int64_t from = 0; from < line_.size; from += part) {
      const int64_t to = std::min(from + part, line_.size);
      if (count > 1 && first + from * line_.stride >= there.begin && last + (to - 1) * line_.stride < there.end) {
        fill_tile(there, line, count, from, to);
      } else {
        for (int64_t l = line; l < line + count; ++l) fill(there, l, from, to);
      }
    }
    line += count;
  }
}

void Dequantizer::fill(const Window& window, int64_t line, int64_t from, int64_t to) const {
  int64_t memory_offset;
  const int64_t begin = line_begin(line, &memory_offset);
  from = std::max(from, divided_up(window.begin - begin, line_.stride));
  to = std::min(to, divided_up(window.end - begin, line_.stride));
  if (from >= to) return;
  compute(window, begin + from * line_.stride, to - from, memory_ + memory_offset + from * line_.memory_stride,
          line_.memory_stride);
}

void Dequantizer::fill_tile(const Window& window, int64_t line, int64_t count, int64_t from, int64_t to) const {
  alignas(64) uint8_t tile[kTileLines * kTileCodes * sizeof(float)];
  int64_t memory_offset;
  const int64_t begin = line_begin(line, &memory_offset) + from * line_.stride;
  for (int64_t l = 0; l < count; ++l) {
    compute(window, begin + l * outer_.back().stride, to - from, tile + l * kTileCodes * itemsize_, itemsize_);
  }
  uint8_t* memory = memory_ + memory_offset + from * line_.memory_stride;
  if (itemsize_ == 4) {
    turn<uint32_t>(tile, count, to - from, memory, line_.memory_stride);
  } else {
    turn<uint16_t>(tile, count, to - from, memory, line_.memory_stride);
  }
}

void Dequantizer::compute(const Window& window, int64_t code, int64_t count, uint8_t* to, int64_t memory_step) const {
  while (count > 0) {
    // The indices of the code in the tensor, and so its scale without the part of the dim along which the line goes.
    int64_t scale = base_scale_, left = code - layout_.first, index = 0;
    for (size_t d = 0; d < layout_.dims.size(); ++d) {
      const CodeLayout::Dim& dim = layout_.dims[d];
      const int64_t at = left / dim.stride;
      left -= at * dim.stride;
      if (d == step_dim_) {
        index = at;
      } else {
        scale += ((dim.offset + at) / dim.block - dim.scale_offset) * dim.scale_stride;
      }
    }
    int64_t run = 1;  // codes before the indices of the other dims change
    if (step_dim_ != SIZE_MAX) run = std::min(count, divided_up(layout_.dims[step_dim_].size - index, step_));
    count -= run;
    while (run > 0) {
      int64_t num = run, number = scale;
      if (step_dim_ != SIZE_MAX) {
        const CodeLayout::Dim& dim = layout_.dims[step_dim_];
        const int64_t block = (dim.offset + index) / dim.block;
        number += (block - dim.scale_offset) * dim.scale_stride;
        num = std::min(run, divided_up((block + 1) * dim.block - dim.offset - index, step_));
        index += num * step_;
      }
      window.tables->decode({window.bytes, code - window.begin, line_.stride, num}, window.scales, number, to,
                            memory_step);
      code += num * line_.stride;
      to += num * memory_step;
      run -= num;
    }
  }
}

}  // namespace bytecheckpoint::staging
