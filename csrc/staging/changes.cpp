// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/changes.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "csrc/base/named_thread.h"
#include "csrc/staging/merge.h"

namespace bytecheckpoint::staging {
namespace {

constexpr int64_t kStretchBytes = 1 << 20;  // what a thread takes at a time
constexpr int64_t kBlockBytes = 4 << 10;    // what memcmp skips where nothing has changed

/// Positions in a stretch fit into 32 bits, whatever the tensor has.
struct Scratch {
  std::vector<uint32_t> positions;
  std::vector<uint8_t> values;
  std::vector<uint8_t> window;
  int64_t count = 0;
};

template <int64_t kBytes>
bool is_equal(const uint8_t* a, const uint8_t* b) {
  return std::memcmp(a, b, kBytes) == 0;  // of a constant size: plain comparisons
}

/// Appends the elements of [begin, end), bytes of a stretch, that differ.
template <int64_t kBytes>
void compare_block(const uint8_t* now, const uint8_t* before, int64_t begin, int64_t end, Scratch* scratch) {
  constexpr int64_t kWord = kBytes < 8 ? 8 : kBytes;
  uint32_t* const positions = scratch->positions.data();
  uint8_t* const values = scratch->values.data();
  int64_t count = scratch->count;
  const auto take_changed = [&](int64_t at) {
    // Always written, and kept only if it differs: a branch for each element would be guessed wrongly too often.
    positions[count] = static_cast<uint32_t>(at / kBytes);
    std::memcpy(values + count * kBytes, now + at, kBytes);
    count += is_equal<kBytes>(now + at, before + at) ? 0 : 1;
  };
  int64_t at = begin;
  for (; at + kWord <= end; at += kWord) {
    if (is_equal<kWord>(now + at, before + at)) continue;
    for (int64_t item = at; item < at + kWord; item += kBytes) take_changed(item);
  }
  for (; at < end; at += kBytes) take_changed(at);
  scratch->count = count;
}

template <int64_t kBytes>
void compare(const uint8_t* now, const uint8_t* before, int64_t bytes, Scratch* scratch) {
  // One more than there are elements: each is written before it is known whether it counts.
  scratch->positions.resize(static_cast<size_t>(kStretchBytes / kBytes + 1));
  scratch->values.resize(static_cast<size_t>(kStretchBytes + kBytes));
  scratch->count = 0;
  for (int64_t begin = 0; begin < bytes; begin += kBlockBytes) {
    const int64_t end = std::min(begin + kBlockBytes, bytes);
    if (std::memcmp(now + begin, before + begin, static_cast<size_t>(end - begin)) == 0) continue;
    compare_block<kBytes>(now, before, begin, end, scratch);
  }
}

void compare(int64_t itemsize, const uint8_t* now, const uint8_t* before, int64_t bytes, Scratch* scratch) {
  switch (itemsize) {
    case 1:
      return compare<1>(now, before, bytes, scratch);
    case 2:
      return compare<2>(now, before, bytes, scratch);
    case 4:
      return compare<4>(now, before, bytes, scratch);
    case 8:
      return compare<8>(now, before, bytes, scratch);
    default:
      return compare<16>(now, before, bytes, scratch);
  }
}

template <class Position>
void write_positions(const std::vector<uint32_t>& positions, int64_t first, uint8_t* out) {
  for (size_t i = 0; i < positions.size(); ++i) {
    const auto position = static_cast<Position>(first + positions[i]);
    std::memcpy(out + i * sizeof(Position), &position, sizeof(Position));
  }
}

int64_t position_at(const Patch& patch, int64_t number) {
  if (patch.position_bytes == 8) {
    uint64_t position = 0;
    std::memcpy(&position, patch.positions + number * 8, 8);
    return static_cast<int64_t>(position);  // negative if it is too large
  }
  uint32_t position = 0;
  std::memcpy(&position, patch.positions + number * 4, 4);
  return position;
}

/// Finds the memory of elements of `from` by their positions in it, which ascend.
class Places {
 public:
  explicit Places(const Patch& patch) : patch_(patch) {
    const size_t dims = patch.from.num_dims();
    last_size_ = dims == 0 ? 1 : patch.from.sizes[dims - 1];
    if (dims > 0) {
      last_stride_ = patch.memory.strides_bytes[dims - 1];
      last_shift_ = patch.from.offsets[dims - 1] - patch.to.offsets[dims - 1];
      last_room_ = patch.to.sizes[dims - 1];
    }
  }

  /// Returns where the element is; null if it is not in `to`.
  uint8_t* find(int64_t position) {
    if (position >= row_end_ || position < row_end_ - last_size_) enter_row(position / last_size_);
    if (row_ == nullptr) return nullptr;
    const int64_t in_row = position - (row_end_ - last_size_) + last_shift_;
    return in_row < 0 || in_row >= last_room_ ? nullptr : row_ + in_row * last_stride_;
  }

 private:
  void enter_row(int64_t row) {
    row_end_ = (row + 1) * last_size_;
    row_ = patch_.memory.data;
    const size_t dims = patch_.from.num_dims();
    for (size_t d = dims < 2 ? 0 : dims - 1; d-- > 0;) {
      const int64_t size = patch_.from.sizes[d];
      const int64_t index = row % size + patch_.from.offsets[d] - patch_.to.offsets[d];
      row /= size;
      if (index < 0 || index >= patch_.to.sizes[d]) {
        row_ = nullptr;
        return;
      }
      row_ += index * patch_.memory.strides_bytes[d];
    }
  }

  const Patch& patch_;
  int64_t last_size_ = 1;
  int64_t last_stride_ = 0;
  int64_t last_shift_ = 0;
  int64_t last_room_ = 1;
  int64_t row_end_ = -1;  // position behind the row; -1: in none yet
  uint8_t* row_ = nullptr;
};

template <int64_t kBytes>
void apply(const Patch& patch, int64_t begin, int64_t end) {
  Places places(patch);
  for (int64_t number = begin; number < end; ++number) {
    uint8_t* const place = places.find(position_at(patch, number));
    if (place != nullptr) std::memcpy(place, patch.values + number * kBytes, kBytes);
  }
}

void apply(const Patch& patch, int64_t begin, int64_t end) {
  switch (tensor::find_dtype(patch.memory.dtype)->itemsize_bytes) {
    case 1:
      return apply<1>(patch, begin, end);
    case 2:
      return apply<2>(patch, begin, end);
    case 4:
      return apply<4>(patch, begin, end);
    case 8:
      return apply<8>(patch, begin, end);
    default:
      return apply<16>(patch, begin, end);
  }
}

}  // namespace

struct Changes::Found {
  size_t tensor = 0;
  int64_t begin = 0, end = 0;  // bytes of the row-major box
  std::vector<uint32_t> positions;
  std::vector<uint8_t> values;
};

Changes::Changes(Changes&&) noexcept = default;
Changes& Changes::operator=(Changes&&) noexcept = default;
Changes::~Changes() = default;

std::optional<Changes> Changes::find(const std::vector<Compared>& tensors, int num_threads, int64_t most_bytes) {
  Changes changes;
  std::vector<tensor::BoxRuns> runs;
  for (const Compared& compared : tensors) {
    OfTensor of_tensor;
    int64_t numel = 0;
    (void)tensor::checked_numel(compared.now.sizes, &numel);  // it is in memory
    of_tensor.itemsize_bytes = tensor::find_dtype(compared.now.dtype)->itemsize_bytes;
    of_tensor.position_bytes = staging::position_bytes(numel);
    of_tensor.first = changes.found_.size();
    const int64_t bytes = numel * of_tensor.itemsize_bytes;
    for (int64_t begin = 0; begin < bytes; begin += kStretchBytes) {
      changes.found_.push_back({runs.size(), begin, std::min(begin + kStretchBytes, bytes), {}, {}});
    }
    of_tensor.end = changes.found_.size();
    changes.tensors_.push_back(of_tensor);
    runs.emplace_back(compared.now);
  }
  std::atomic<size_t> next{0};
  std::atomic<int64_t> bytes_found{0};
  base::work_together("bcp-changes", static_cast<size_t>(std::max(num_threads, 1)), [&] {
    Scratch scratch;
    for (size_t s = next++; s < changes.found_.size() && bytes_found <= most_bytes; s = next++) {
      Found& found = changes.found_[s];
      const Compared& compared = tensors[found.tensor];
      const OfTensor& of_tensor = changes.tensors_[found.tensor];
      const uint8_t* now = compared.now.data + found.begin;
      if (!tensor::is_row_major(compared.now)) {
        scratch.window.resize(static_cast<size_t>(kStretchBytes));
        gather_window(runs[found.tensor], compared.now.data, found.begin, found.end, scratch.window.data());
        now = scratch.window.data();
      }
      compare(of_tensor.itemsize_bytes, now, compared.before + found.begin, found.end - found.begin, &scratch);
      found.positions.assign(scratch.positions.begin(), scratch.positions.begin() + scratch.count);
      found.values.assign(scratch.values.begin(), scratch.values.begin() + scratch.count * of_tensor.itemsize_bytes);
      bytes_found += scratch.count * (of_tensor.itemsize_bytes + of_tensor.position_bytes);
    }
  });
  if (bytes_found > most_bytes) return std::nullopt;
  for (const Found& found : changes.found_) {
    changes.tensors_[found.tensor].count += static_cast<int64_t>(found.positions.size());
  }
  return changes;
}

void Changes::write(size_t number, uint8_t* positions, uint8_t* values) const {
  const OfTensor& of_tensor = tensors_[number];
  for (size_t s = of_tensor.first; s < of_tensor.end; ++s) {
    const Found& found = found_[s];
    const int64_t first = found.begin / of_tensor.itemsize_bytes;
    if (of_tensor.position_bytes == 8) {
      write_positions<uint64_t>(found.positions, first, positions);
    } else {
      write_positions<uint32_t>(found.positions, first, positions);
    }
    positions += found.positions.size() * static_cast<size_t>(of_tensor.position_bytes);
    if (!found.values.empty()) std::memcpy(values, found.values.data(), found.values.size());
    values += found.values.size();
  }
}

base::Status check_positions(const Patch& patch) {
  int64_t numel = 0, last = -1;
  if (!tensor::checked_numel(patch.from.sizes, &numel)) numel = 0;
  for (int64_t number = 0; number < patch.count; ++number) {
    const int64_t position = position_at(patch, number);
    if (position <= last || position >= numel) {
      return base::Status::make(base::Code::kCorrupt,
                                base::text("position ", number, " of ", patch.count, " is ", position, ", after ", last,
                                           ", in a box of ", numel, " elements: positions must ascend inside it"));
    }
    last = position;
  }
  return base::Status::ok();
}

void apply_patches(const std::vector<Patch>& patches, int num_threads) {
  constexpr int64_t kSlice = 1 << 16;  // positions that a thread takes at a time
  struct Slice {
    size_t patch;
    int64_t begin;
  };
  std::vector<Slice> slices;
  for (size_t p = 0; p < patches.size(); ++p) {
    for (int64_t begin = 0; begin < patches[p].count; begin += kSlice) slices.push_back({p, begin});
  }
  std::atomic<size_t> next{0};
  const auto most = static_cast<size_t>(std::max(num_threads, 1));
  base::work_together("bcp-apply", std::min(most, std::max<size_t>(slices.size(), 1)), [&] {
    for (size_t s = next++; s < slices.size(); s = next++) {
      const Patch& patch = patches[slices[s].patch];
      apply(patch, slices[s].begin, std::min(slices[s].begin + kSlice, patch.count));
    }
  });
}

}  // namespace bytecheckpoint::staging
