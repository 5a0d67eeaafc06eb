// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/planner/inventory.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::planner {

/// Options of `plan_save`.
struct SaveOptions {
  /// If true, the lowest rank that holds a box writes it, and no box is split. Default: false.
  bool dedup_to_lowest_rank = false;
  /// Least size of a part when a box is split, in bytes, because each record costs some hundred bytes and its own place
  /// in the metadata.
  int64_t min_part_bytes = 64 << 10;
  /// If true, tensors are also planned if the ranks together hold only a part of them. Default: false, such a tensor is
  /// an error.
  bool allow_gaps = false;
};

/// The rows of a box that one rank writes. Rows are counted along the outermost dim whose size in the box is above 1.
struct Part {
  uint32_t rank = 0;
  int64_t first_row = 0;
  int64_t num_rows = 0;
};

/// Who writes what. A box is named by its number in the inventory that the plan was made from:
///
///     written by one rank       writers[box] = rank
///     split into parts          writers[box] = kSplit | s, the number of a split; its parts are those
///                               from parts[first_part[s]] to before parts[first_part[s + 1]]
///     not written               writers[box] = kNobody
struct SavePlan {
  /// Marks a box that is not written, because it has no elements and another box of its tensor begins at the same
  /// place.
  static constexpr uint32_t kNobody = UINT32_MAX;
  /// This bit marks a writer that is not a rank but the number of a split.
  static constexpr uint32_t kSplit = 1u << 31;

  std::vector<uint32_t> writers;     // of each box: a rank, kNobody, or kSplit | split
  std::vector<uint64_t> first_part;  // of each split, then the number of all parts
  std::vector<Part> parts;           // those of a split ascend by row and by rank
  std::vector<int64_t> rank_bytes;   // bytes of elements that each rank writes; see Inventory::box_bytes

  static bool is_split(uint32_t writer) { return writer != kNobody && (writer & kSplit) != 0; }

  /// Returns the bytes of the rank that writes most, and of all ranks together.
  int64_t max_bytes() const;
  int64_t total_bytes() const;
};

/// One chunk of the metadata: a box, or a part of one, and its writer.
struct PlannedChunk {
  uint32_t rank = 0;  // that writes the chunk
  tensor::Box box;
};

/// Decides who writes each box: one of the ranks that may (`Inventory::writers`), or several of them a part each. Keeps
/// the largest rank's bytes small.
///
/// Boxes that only one rank holds are given to it first. The others are handled by their sets of holders, sets of
/// fewest ranks first, because these have the least choice. Within a set, boxes with the largest indivisible piece come
/// first (a box that cannot be split is one piece; otherwise a piece is a row, or min_part_bytes), then larger boxes.
/// Each goes to the holder with the fewest bytes so far; ties go to the lower rank, so every rank computes the same
/// plan.
/// If a box would lift even that holder above its share, it is split: the least loaded holders take as many rows as
/// they lack, in as few parts as possible (McNaughton's wrap-around rule). Each record counts kRecordCostBytes in
/// addition to its elements, so that many small records are spread, too. Objects, and boxes without elements, are
/// written by their lowest holder.
/// Source: ByteCheckpoint (NSDI'25), workload-balanced deduplication; this one weighs bytes, not elements, and splits.
///
/// Never split: boxes whose entry forbids it, opaque dtypes, boxes of less than twice min_part_bytes.
///
/// \param inventory  Of all ranks, 0 to n - 1.
/// \returns kInvalidArgument if a rank is missing or validate_inventory refuses the inventory.
/// Pure and deterministic; O(n log n) in boxes and holders.
base::Result<SavePlan> plan_save(const Inventory& inventory, const SaveOptions& options);

/// What a record costs beside its elements when `plan_save` balances.
inline constexpr int64_t kRecordCostBytes = 1024;

/// Returns the chunks of an entry as DCP's metadata lists them: by rank, and for each rank in the order of the boxes.
std::vector<PlannedChunk> chunks_of(const Inventory& inventory, const SavePlan& plan, const Entry& entry);

/// Returns the dim along which a box is split: the outermost dim whose size is above 1; num_dims if there is none.
size_t row_dim(const int64_t* box_sizes, size_t num_dims);

/// Returns the box of the rows of `part` in box `number` of `entry`.
tensor::Box part_of_box(const Inventory& inventory, const Entry& entry, size_t number, const Part& part);

}  // namespace bytecheckpoint::planner
