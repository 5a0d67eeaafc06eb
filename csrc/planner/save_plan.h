// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/planner/inventory.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::planner {

struct SaveOptions {
  /// Everything is written by the lowest of its holders, and nothing is split.
  bool dedup_to_lowest_rank = false;
  /// A split leaves no part below this: a record costs a few hundred bytes and its own place in the metadata.
  int64_t min_part_bytes = 64 << 10;
  /// Tensors of which ranks hold but parts are planned, too.
  bool allow_gaps = false;
};

/// Rows of a box, counted along its outermost dim of a size above 1, that one rank writes.
struct Part {
  uint32_t rank = 0;
  int64_t first_row = 0;
  int64_t num_rows = 0;
};

/// Who writes what. Names boxes by their number in the inventory it was made from.
struct SavePlan {
  /// Of a box that is not written: it has no elements, and another box of its tensor begins at the same place.
  static constexpr uint32_t kNobody = UINT32_MAX;
  /// Set in a writer that is not a rank but the number of a split.
  static constexpr uint32_t kSplit = 1u << 31;

  std::vector<uint32_t> writers;     // of each box: a rank, kNobody, or kSplit | split
  std::vector<uint64_t> first_part;  // of each split, and the end
  std::vector<Part> parts;           // of one split: ascending, both by row and by rank
  std::vector<int64_t> rank_bytes;   // elements that each rank writes; see Inventory::box_bytes

  static bool is_split(uint32_t writer) { return writer != kNobody && (writer & kSplit) != 0; }

  int64_t max_bytes() const;
  int64_t total_bytes() const;
};

/// One chunk of the metadata.
struct PlannedChunk {
  uint32_t rank = 0;  // that writes it
  tensor::Box box;
};

/// Decides who writes each box: one of its holders, or several a part each, so that the largest rank's bytes are small.
///
/// Boxes with one holder come first, then sets of holders, smallest set first. Within a set those of the coarsest grain
/// first (what cannot be split at all, then what has long rows), then largest first, each to the holder with the least
/// bytes; ties go to the lower rank. A box that would lift even that one above what is its share is cut: the least
/// loaded holders take the rows they lack, in as few parts as possible (McNaughton's wrap-around rule). A record counts
/// kRecordCostBytes beside its elements, so that many small ones spread, too. Objects, and boxes without elements, are
/// written by their lowest holder.
/// Source: ByteCheckpoint (NSDI'25), workload-balanced deduplication; weighs bytes, not elements; splits.
///
/// Never split: what its entry forbids, opaque dtypes, boxes below twice min_part_bytes.
///
/// \param inventory  Of all ranks, 0 to n - 1.
/// \returns kInvalidArgument if a rank is missing, or for what validate_inventory refuses.
/// Pure and deterministic; O(n log n) in boxes and holders.
base::Result<SavePlan> plan_save(const Inventory& inventory, const SaveOptions& options);

inline constexpr int64_t kRecordCostBytes = 1024;

/// Chunks of an entry as DCP's metadata lists them: those of the lowest rank first; of one rank, in order of boxes.
std::vector<PlannedChunk> chunks_of(const Inventory& inventory, const SavePlan& plan, const Entry& entry);

/// Along which dim a box is split: the outermost of a size above 1; num_dims if there is none.
size_t row_dim(const int64_t* box_sizes, size_t num_dims);

/// The rows of `part` in the box `number` of `entry`.
tensor::Box part_of_box(const Inventory& inventory, const Entry& entry, size_t number, const Part& part);

}  // namespace bytecheckpoint::planner
