// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/validate.h"

#include <vector>

#include "csrc/base/bytes.h"
#include "csrc/planner/coverage.h"

namespace bytecheckpoint::planner {
namespace {

using base::Code;
using base::Status;
using base::text;

/// A limit far below that of int64, so that sums of such sums cannot overflow.
constexpr int64_t kMaxBytes = int64_t{1} << 60;

class Validation {
 public:
  Validation(const Inventory& inventory, bool allow_gaps) : inventory_(inventory), allow_gaps_(allow_gaps) {}

  Status run() {
    for (const Entry& entry : inventory_.entries) {
      if (!entry.is_tensor()) continue;
      BCP_RETURN_IF_ERROR(unpack(entry));
      if (entry.kind == EntryKind::kShard) BCP_RETURN_IF_ERROR(check_tiling(entry));
      if (bytes_ > kMaxBytes) return refuse(entry, "the state has more bytes than fit in 60 bits");
    }
    return Status::ok();
  }

 private:
  /// Fills boxes_, checks that they lie in the tensor, and adds up their bytes. One walk does all, because the boxes of
  /// an entry do not fit in the fastest cache.
  Status unpack(const Entry& entry) {
    const int64_t* sizes = inventory_.sizes(entry);
    const size_t num_dims = entry.num_dims;
    const int64_t element = element_bytes(entry);
    inventory_.unpack_boxes(entry, &numbers_);
    boxes_.resize(entry.num_boxes);
    for (size_t b = 0; b < entry.num_boxes; ++b) {
      const int64_t* box = boxes_[b] = numbers_.data() + 2 * b * num_dims;
      for (size_t d = 0; d < num_dims; ++d) {
        if (box[num_dims + d] > sizes[d] || box[d] > sizes[d] - box[num_dims + d]) {
          return refuse(entry, text(box_text(entry, b), " lies outside the tensor"));
        }
      }
      if (bytes_ > kMaxBytes || !base::checked_add(bytes_, times_box(element, box, num_dims), &bytes_)) {
        bytes_ = kMaxBytes + 1;
      }
    }
    return Status::ok();
  }

  Status check_tiling(const Entry& entry) {
    const int64_t* sizes = inventory_.sizes(entry);
    const size_t num_dims = entry.num_dims;
    const auto fault = find_tiling_fault(boxes_, tensor::Dims(sizes, sizes + num_dims));
    if (fault.has_value() && fault->is_overlap()) {
      const auto [a, b] = fault->overlap;
      return refuse(entry, text(box_text(entry, a), " and ", box_text(entry, b), " overlap"));
    }
    if (!fault.has_value() || allow_gaps_) return Status::ok();
    return Status::make(Code::kInvalidArgument, text("'", inventory_.fqn(entry), "': ", fault->gap,
                                                     " in no chunk: no rank of this save holds them", kHowToCover));
  }

  std::string box_text(const Entry& entry, size_t number) const {
    const uint32_t rank = inventory_.rank_sets.lowest(inventory_.box_holders(entry, number));
    return text("the ", box_to_text(boxes_[number], entry.num_dims), " of rank ", rank);
  }

  Status refuse(const Entry& entry, const std::string& why) const {
    return Status::make(Code::kInvalidArgument,
                        text("'", inventory_.fqn(entry), "': ", to_text(inventory_, entry), ": ", why));
  }

  const Inventory& inventory_;
  const bool allow_gaps_;
  int64_t bytes_ = 0;  // of all boxes so far; above kMaxBytes if there are too many to be added up
  // The boxes of the current entry.
  std::vector<int64_t> numbers_;
  std::vector<const int64_t*> boxes_;
};

}  // namespace

Status validate_inventory(const Inventory& inventory, bool allow_gaps) {
  return Validation(inventory, allow_gaps).run();
}

}  // namespace bytecheckpoint::planner
