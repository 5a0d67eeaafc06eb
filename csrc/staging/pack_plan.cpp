// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/pack_plan.h"

#include <algorithm>
#include <limits>
#include <string_view>

#include "csrc/base/bytes.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::staging {
namespace {

using base::Code;
using base::Status;
using base::text;

// Scratch and host addresses have the same last bits, so that what is aligned on one side is aligned on the other.
constexpr int64_t kScratchAlignment = 256;

Status refuse(size_t piece, std::string_view why) {
  return Status::make(Code::kInvalidArgument, text("piece ", piece, " of a device transfer: ", why));
}

}  // namespace

Status check_pieces(const std::vector<DevicePiece>& pieces) {
  int64_t end = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const tensor::StridedView& view = pieces[i].view;
    const tensor::DTypeInfo* info = tensor::find_plain_dtype(view.dtype);
    if (info == nullptr) return refuse(i, "its dtype is not plain");
    if (view.strides_bytes.size() != view.sizes.size()) return refuse(i, "sizes and strides differ in number");
    int64_t numel = 0;
    constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
    if (!tensor::checked_numel(view.sizes, &numel) || numel > kMax / info->itemsize_bytes) {
      return refuse(i, text("its sizes are ", tensor::to_text(view.sizes)));
    }
    if (numel == 0) continue;
    if (view.data == nullptr) return refuse(i, "it has elements and no memory");
    const int64_t bytes = numel * info->itemsize_bytes;
    if (pieces[i].host_offset < end) {
      return refuse(i, text("offset ", pieces[i].host_offset, " in the host buffer is less than ", end,
                            ", where the one before it ends"));
    }
    if (pieces[i].host_offset > kMax - bytes) return refuse(i, "it ends beyond int64");
    end = pieces[i].host_offset + bytes;
  }
  return Status::ok();
}

bool PackPlan::goes_direct(const ElementLayout& layout) const {
  return limits_.scratch_bytes == 0 || (is_contiguous(layout) && packed_bytes(layout) > limits_.max_packed_bytes);
}

bool PackPlan::take_units(PackBatch* batch, bool may_join) {
  if (static_cast<int64_t>(batch->pieces.size()) == limits_.max_pieces) return false;
  const int64_t host_offset = pieces_[next_piece_].host_offset + next_unit_ * layout_.unit_bytes;
  int64_t gap = 0;
  if (may_join) gap = host_offset - batch->ranges.back().host_offset - batch->ranges.back().bytes;
  may_join = may_join && gap <= limits_.max_gap_bytes;
  const int64_t begin = may_join
                            ? batch->scratch_bytes + gap
                            : base::align_up(batch->scratch_bytes, kScratchAlignment) + host_offset % kScratchAlignment;
  const int64_t room = std::max<int64_t>(limits_.scratch_bytes - begin, 0);
  const int64_t units_left = layout_.num_units - next_unit_;
  int64_t num_units = std::min(units_left, room / layout_.unit_bytes);
  // The tail needs room, too, with the last unit.
  if (num_units == units_left && num_units * layout_.unit_bytes + layout_.tail_bytes > room) --num_units;
  if (num_units <= 0) return false;

  if (!may_join) {
    batch->ranges.push_back({begin, host_offset, 0});
  } else if (gap > 0) {
    batch->has_gaps = true;
  }
  const auto number = static_cast<uint32_t>(batch->pieces.size());
  batch->pieces.push_back({layout_, begin - next_unit_ * layout_.unit_bytes});
  batch->scratch_bytes = begin;
  for (const int64_t end_unit = next_unit_ + num_units; next_unit_ < end_unit;) {
    const int64_t count = std::min(kTileBytes / layout_.unit_bytes, end_unit - next_unit_);
    batch->tiles.push_back({next_unit_, static_cast<uint32_t>(count), number});
    batch->scratch_bytes += tile_bytes(layout_, batch->tiles.back());
    next_unit_ += count;
  }
  batch->ranges.back().bytes = batch->scratch_bytes - batch->ranges.back().scratch_offset;
  return true;
}

bool PackPlan::next(PackBatch* batch) {
  batch->pieces.clear();
  batch->tiles.clear();
  batch->ranges.clear();
  batch->direct.clear();
  batch->has_gaps = false;
  batch->scratch_bytes = 0;
  // A range may not continue across a piece that is copied directly: it would write over that piece.
  bool may_join = false;
  while (next_piece_ < pieces_.size()) {
    if (next_unit_ == 0) {
      const std::optional<ElementLayout> layout = layout_of(pieces_[next_piece_].view);
      if (layout.has_value() && layout->num_units == 0) {
        ++next_piece_;
        continue;
      }
      if (!layout.has_value() || goes_direct(*layout)) {
        batch->direct.push_back(next_piece_++);
        may_join = false;
        continue;
      }
      layout_ = *layout;
    }
    if (!take_units(batch, may_join)) return true;
    may_join = true;
    if (next_unit_ < layout_.num_units) return true;  // scratch is full
    next_unit_ = 0;
    ++next_piece_;
  }
  return !batch->pieces.empty() || !batch->direct.empty();
}

}  // namespace bytecheckpoint::staging
