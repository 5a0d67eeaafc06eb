// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/merge.h"

#include <algorithm>
#include <cstring>

namespace bytecheckpoint::staging {
namespace {

/// Copies `count` elements of kBytes each, from one even stride to another. memcpy of a constant size becomes a plain
/// move.
template <int64_t kBytes>
void copy_elements(const uint8_t* from, int64_t from_step, uint8_t* to, int64_t to_step, int64_t count) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * to_step, from + i * from_step, kBytes);
}

void copy_strided(const uint8_t* from, int64_t from_step, uint8_t* to, int64_t to_step, int64_t bytes,
                  int64_t itemsize) {
  if (from_step == itemsize && to_step == itemsize) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  const int64_t count = bytes / itemsize;
  switch (itemsize) {
    case 1:
      return copy_elements<1>(from, from_step, to, to_step, count);
    case 2:
      return copy_elements<2>(from, from_step, to, to_step, count);
    case 4:
      return copy_elements<4>(from, from_step, to, to_step, count);
    case 8:
      return copy_elements<8>(from, from_step, to, to_step, count);
    default:
      return copy_elements<16>(from, from_step, to, to_step, count);
  }
}

/// Calls `piece(window_offset, memory_offset, bytes)` for every part of a run inside chunk bytes [begin, end).
template <class Piece>
void for_each_piece(const tensor::BoxRuns& runs, int64_t begin, int64_t end, Piece&& piece) {
  for (int64_t run = runs.first_run_ending_after(begin); run < runs.num_runs(); ++run) {
    const int64_t run_begin = runs.chunk_offset(run);
    if (run_begin >= end) return;
    const int64_t from = std::max(begin, run_begin);
    const int64_t to = std::min(end, run_begin + runs.run_bytes());
    const int64_t elements_in = (from - run_begin) / runs.itemsize_bytes();
    piece(from - begin, runs.memory_offset(run) + elements_in * runs.memory_step_bytes(), to - from);
  }
}

}  // namespace

void gather_window(const tensor::BoxRuns& runs, const uint8_t* memory, int64_t begin, int64_t end, uint8_t* window) {
  for_each_piece(runs, begin, end, [&](int64_t window_offset, int64_t memory_offset, int64_t bytes) {
    copy_strided(memory + memory_offset, runs.memory_step_bytes(), window + window_offset, runs.itemsize_bytes(), bytes,
                 runs.itemsize_bytes());
  });
}

void scatter_window(const tensor::BoxRuns& runs, const uint8_t* window, int64_t begin, int64_t end, uint8_t* memory) {
  for_each_piece(runs, begin, end, [&](int64_t window_offset, int64_t memory_offset, int64_t bytes) {
    copy_strided(window + window_offset, runs.itemsize_bytes(), memory + memory_offset, runs.memory_step_bytes(), bytes,
                 runs.itemsize_bytes());
  });
}

}  // namespace bytecheckpoint::staging
