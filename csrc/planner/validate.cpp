// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/validate.h"

#include <vector>

#include "csrc/base/bytes.h"
#include "csrc/planner/find_overlap.h"

namespace bytecheckpoint::planner {
namespace {

using base::Code;
using base::Status;
using base::text;

/// Sums of sums of bytes stay far from the end of int64.
constexpr int64_t kMaxBytes = int64_t{1} << 60;

class Validation {
 public:
  explicit Validation(const Inventory& inventory)
      : inventory_(inventory), is_of_one_rank_(inventory.rank_sets.size(inventory.ranks) == 1) {}

  Status run() {
    int64_t bytes = 0;
    for (const Entry& entry : inventory_.entries) {
      if (!entry.is_tensor()) continue;
      if (entry.kind == EntryKind::kShard) BCP_RETURN_IF_ERROR(check_shards(entry));
      for (size_t b = 0; b < entry.num_boxes; ++b) {
        if (!base::checked_add(bytes, inventory_.box_bytes(entry, b), &bytes) || bytes > kMaxBytes) {
          return refuse(entry, "more bytes in all than fit in 60 bits");
        }
      }
    }
    return Status::ok();
  }

 private:
  Status check_shards(const Entry& entry) {
    const int64_t* sizes = inventory_.sizes(entry);
    const size_t num_dims = entry.num_dims;
    boxes_.resize(entry.num_boxes);
    int64_t elements = 0;
    bool fits = true;
    for (size_t b = 0; b < entry.num_boxes; ++b) {
      const int64_t* box = boxes_[b] = inventory_.box_dims(entry, b);
      int64_t numel = 1;
      for (size_t d = 0; d < num_dims; ++d) {
        if (box[num_dims + d] > sizes[d] || box[d] > sizes[d] - box[num_dims + d]) {
          return refuse(entry, text(box_text(entry, b), " lies outside"));
        }
        numel *= box[num_dims + d];
      }
      fits = base::checked_add(elements, numel, &elements) && fits;
    }
    int64_t whole = 1;
    for (size_t d = 0; d < num_dims; ++d) whole *= sizes[d];
    const auto [a, b] = find_overlap(boxes_, num_dims);
    if (a != b) return refuse(entry, text(box_text(entry, a), " and ", box_text(entry, b), " overlap"));
    if (!is_of_one_rank_ && (!fits || elements != whole)) {
      return refuse(entry,
                    text("the ", entry.num_boxes, " boxes that ranks hold have ", elements, " elements of ", whole));
    }
    return Status::ok();
  }

  std::string box_text(const Entry& entry, size_t number) const {
    const uint32_t rank = inventory_.rank_sets.lowest(inventory_.box_holders(entry, number));
    return text("the ", box_to_text(inventory_.box_dims(entry, number), entry.num_dims), " of rank ", rank);
  }

  Status refuse(const Entry& entry, const std::string& why) const {
    return Status::make(Code::kInvalidArgument,
                        text("'", inventory_.fqn(entry), "': ", to_text(inventory_, entry), ": ", why));
  }

  const Inventory& inventory_;
  const bool is_of_one_rank_;
  std::vector<const int64_t*> boxes_;
};

}  // namespace

Status validate_inventory(const Inventory& inventory) {
  return Validation(inventory).run();
}

}  // namespace bytecheckpoint::planner
