// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/coverage.h"

#include <algorithm>

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr std::string_view kInNoChunk = " in no chunk";

bool is_whole(const format::Item& item) {
  return item.chunks.size() == 1 && item.chunks.front().box == tensor::whole(item.tensor.sizes);
}

std::string overlap_text(const format::Item& item, const planner::TilingFault& fault) {
  const auto box = [&](size_t number) {
    const tensor::Box& chunk = item.chunks[number].box;
    return text("the chunk at ", tensor::to_text(chunk.offsets), " of ", tensor::to_text(chunk.sizes));
  };
  return text("'", item.fqn, "': ", box(fault.overlap.first), " and ", box(fault.overlap.second), " overlap");
}

Status check_bounds(const format::Item& item) {
  const tensor::Dims& sizes = item.tensor.sizes;
  int64_t numel;
  if (sizes.size() > format::kMaxDims) {
    return Status::make(Code::kInvalidArgument, text("'", item.fqn, "': has ", sizes.size(),
                                                     " dims, but the format allows at most ", format::kMaxDims));
  }
  if (!tensor::checked_numel(sizes, &numel)) {
    return Status::make(Code::kInvalidArgument,
                        text("'", item.fqn, "': there can be no tensor of shape ", tensor::to_text(sizes)));
  }
  for (const format::Chunk& chunk : item.chunks) {
    if (tensor::is_inside(chunk.box, sizes)) continue;
    return Status::make(Code::kInvalidArgument, text("'", item.fqn, "' chunk at ", tensor::to_text(chunk.box.offsets),
                                                     " of ", tensor::to_text(chunk.box.sizes),
                                                     ": outside its tensor of shape ", tensor::to_text(sizes)));
  }
  return Status::ok();
}

}  // namespace

std::optional<planner::TilingFault> CoverageCheck::find(const format::Item& item) {
  if (!item.is_tensor || is_whole(item)) return std::nullopt;
  numbers_.clear();
  for (const format::Chunk& chunk : item.chunks) numbers_.add(chunk.box);
  return planner::find_tiling_fault(numbers_.boxes(item.tensor.sizes.size()), item.tensor.sizes);
}

std::string CoverageCheck::fault(const format::Item& item) {
  const auto found = find(item);
  if (!found.has_value() || (item.is_partial && !found->is_overlap())) return {};
  if (found->is_overlap()) return overlap_text(item, *found);
  return text("'", item.fqn, "': ", found->gap, kInNoChunk);
}

bool CoverageCheck::has_gap(const format::Item& item) {
  const auto found = find(item);
  if (!found.has_value() || !found->is_overlap()) return found.has_value();
  const tensor::Dims& sizes = item.tensor.sizes;
  return !planner::find_gap(numbers_.boxes(sizes.size()), tensor::whole(sizes), sizes).empty();
}

Status CoverageCheck::check(Gaps gaps, format::Item* item) {
  BCP_RETURN_IF_ERROR(check_bounds(*item));
  const auto found = find(*item);
  if (!found.has_value()) return Status::ok();
  if (found->is_overlap()) return Status::make(Code::kInvalidArgument, overlap_text(*item, *found));
  if (gaps == Gaps::kMark) item->is_partial = true;
  if (gaps == Gaps::kIgnore || item->is_partial) return Status::ok();
  return Status::make(Code::kInvalidArgument,
                      text("'", item->fqn, "': ", found->gap, kInNoChunk, planner::kHowToCover));
}

void PartsCoverage::add(const format::Item& item) {
  if (!item.is_tensor) return;
  Union& all = tensors_[{item.fqn, item.tensor.sizes}];
  all.is_partial = all.is_partial || item.is_partial;
  all.is_covered = all.is_covered || is_whole(item);
  if (all.is_covered) {
    all.numbers = {};
    return;
  }
  for (const format::Chunk& chunk : item.chunks) all.numbers.add(chunk.box);
}

std::vector<std::pair<std::string, std::string>> PartsCoverage::faults() {
  std::vector<std::pair<std::string, std::string>> found;
  for (auto& [key, all] : tensors_) {
    if (all.is_covered || all.is_partial) continue;
    const auto& [fqn, sizes] = key;
    const std::string gap = planner::find_gap(all.numbers.boxes(sizes.size()), tensor::whole(sizes), sizes);
    if (!gap.empty()) found.emplace_back(fqn, text("'", fqn, "': ", gap, " in no chunk of any part"));
  }
  return found;
}

}  // namespace bytecheckpoint::engine
