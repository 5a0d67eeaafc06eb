// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/rank_assignment.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "csrc/base/varint.h"

namespace bytecheckpoint::planner {
namespace {

using base::Code;
using base::Status;
using base::text;

// assignment = version, number of boxes that the rank holds, number of writes, then for each write:
//              boxes skipped since the write before, number of rows (0: the whole box), [first row]
constexpr uint8_t kAssignmentVersion = 1;
constexpr size_t kLeastWriteBytes = 2;

/// The assignment of one rank, as far as it is known.
struct DraftAssignment {
  base::VarintWriter writes;
  uint64_t num_writes = 0;
  uint64_t num_boxes = 0;  // boxes of the rank that were seen so far
  uint64_t next_box = 0;   // the box behind the last write

  void write(uint64_t box, int64_t num_rows, int64_t first_row) {
    writes.number(box - next_box);
    writes.number(static_cast<uint64_t>(num_rows));
    if (num_rows != 0) writes.number(static_cast<uint64_t>(first_row));
    next_box = box + 1;
    ++num_writes;
  }
};

}  // namespace

std::vector<std::string> encode_assignments(const Inventory& inventory, const SavePlan& plan) {
  std::vector<DraftAssignment> drafts(plan.rank_bytes.size());
  for (const uint32_t e : inventory.by_name()) {
    const Entry& entry = inventory.entries[e];
    for (uint32_t b = 0; b < entry.num_boxes; ++b) {
      const uint32_t writer = plan.writers[entry.boxes_begin + b];
      if (SavePlan::is_split(writer)) {
        const uint32_t split = writer & ~SavePlan::kSplit;
        for (uint64_t p = plan.first_part[split]; p < plan.first_part[split + 1]; ++p) {
          const Part& part = plan.parts[p];
          drafts[part.rank].write(drafts[part.rank].num_boxes, part.num_rows, part.first_row);
        }
      } else if (writer != SavePlan::kNobody) {
        drafts[writer].write(drafts[writer].num_boxes, 0, 0);
      }
      inventory.rank_sets.for_each(inventory.box_holders(entry, b), [&](uint32_t rank) { ++drafts[rank].num_boxes; });
    }
  }
  std::vector<std::string> assignments;
  assignments.reserve(drafts.size());
  for (DraftAssignment& draft : drafts) {
    base::VarintWriter out;
    out.u8(kAssignmentVersion);
    out.number(draft.num_boxes);
    out.number(draft.num_writes);
    out.raw(draft.writes.take());
    assignments.push_back(out.take());
  }
  return assignments;
}

base::Result<std::vector<PlannedWrite>> apply_assignment(const Inventory& local, std::string_view assignment) {
  if (local.rank_sets.size(local.ranks) != 1) {
    return Status::make(Code::kInvalidArgument, "an assignment is for the inventory of one rank");
  }
  std::vector<std::pair<uint32_t, uint32_t>> boxes;  // (entry, number), in the order in which assignments count boxes
  boxes.reserve(local.num_boxes());
  for (const uint32_t e : local.by_name()) {
    for (uint32_t b = 0; b < local.entries[e].num_boxes; ++b) boxes.emplace_back(e, b);
  }
  base::VarintReader reader(assignment);
  const auto damaged = [&] {
    return Status::make(Code::kCorrupt,
                        text("assignment of a rank: damaged at byte ", reader.position(), " of ", assignment.size()));
  };
  if (reader.u8() != kAssignmentVersion) return damaged();
  const uint64_t num_boxes = reader.number();
  if (reader.ok() && num_boxes != boxes.size()) {
    return Status::make(Code::kInvalidArgument, text("the assignment is for a rank with ", num_boxes,
                                                     " boxes, but this rank has ", boxes.size()));
  }
  const size_t num_writes = reader.count(kLeastWriteBytes);
  // A box is written at most once. This is checked before the allocation, because a write takes 50 times its encoded
  // bytes in memory.
  if (num_writes > boxes.size()) return damaged();
  std::vector<PlannedWrite> writes(num_writes);
  uint64_t next_box = 0;
  BoxArray numbers;
  for (PlannedWrite& write : writes) {
    const uint64_t passed_over = reader.number();
    Part part;
    part.num_rows = reader.i64();
    part.first_row = part.num_rows == 0 ? 0 : reader.i64();
    if (!reader.ok() || passed_over >= boxes.size() - next_box) return damaged();
    std::tie(write.entry, write.number) = boxes[next_box + passed_over];
    next_box += passed_over + 1;
    const Entry& entry = local.entries[write.entry];
    if (part.num_rows == 0) {
      write.box = local.box(entry, write.number);
      continue;
    }
    const int64_t* sizes = local.box_dims(entry, write.number, &numbers) + entry.num_dims;
    const size_t dim = row_dim(sizes, entry.num_dims);
    if (dim == entry.num_dims || part.num_rows >= sizes[dim] || part.first_row > sizes[dim] - part.num_rows) {
      return damaged();
    }
    write.is_whole = false;
    write.box = part_of_box(local, entry, write.number, part);
  }
  if (!reader.ok() || reader.remaining() != 0) return damaged();
  std::sort(writes.begin(), writes.end(), [](const PlannedWrite& a, const PlannedWrite& b) {
    return std::pair(a.entry, a.number) < std::pair(b.entry, b.number);
  });
  return writes;
}

}  // namespace bytecheckpoint::planner
