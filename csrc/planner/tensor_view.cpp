// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/tensor_view.h"

#include <algorithm>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/tensor/flat_range.h"

namespace bytecheckpoint::planner {
namespace {

using base::Code;
using base::Status;
using base::text;
using tensor::Box;
using tensor::Dims;

Status refuse(std::string message) {
  return Status::make(Code::kInvalidArgument, std::move(message));
}

Status check_dim(const Dims& sizes, size_t dim) {
  if (dim < sizes.size()) return Status::ok();
  return refuse(text("there is no dim ", dim, " in shape ", tensor::to_text(sizes)));
}

void insert_at(Dims* dims, size_t dim, int64_t value) {
  dims->push_back(value);
  std::rotate(dims->begin() + dim, dims->end() - 1, dims->end());
}

/// Dims [begin, end) of a tensor that become dims [new_begin, new_end) of another one, with as many elements.
struct Group {
  size_t begin, end, new_begin, new_end;
};

/// Finds the smallest groups of neighbouring dims that have as many elements in both shapes. Neither has a size of 0.
std::vector<Group> groups_of(const Dims& from, const Dims& to) {
  std::vector<Group> groups;
  for (size_t i = 0, j = 0; i < from.size() || j < to.size();) {
    Group group{i, i, j, j};
    int64_t old_numel = 1, new_numel = 1;
    do {
      if (group.new_end == to.size() || (old_numel < new_numel && group.end < from.size())) {
        old_numel *= from[group.end++];
      } else if (group.end == from.size() || new_numel < old_numel) {
        new_numel *= to[group.new_end++];
      } else {
        old_numel *= from[group.end++];
        new_numel *= to[group.new_end++];
      }
    } while (old_numel != new_numel);
    groups.push_back(group);
    i = group.end;
    j = group.new_end;
  }
  return groups;
}

/// A part of a box within one group: a box of the new dims.
struct Piece {
  Box box;
  int64_t offset;  // elements of the record, from the first one of the old box
  Dims strides;
};

/// Cuts the part of a box that lies in one group into boxes of the new dims.
///
/// The innermost dims of which the box has everything, and whose elements are evenly spaced in the record, are one run
/// with the dim before them. Each run is a range of the flattened group:
///
///     group [2, 3], box [0:2, 1:3] of it     . a b      runs [1, 3) and [4, 6) of 6 elements
///                                            . c d
base::Result<std::vector<Piece>> pieces_of(const ViewedBox& viewed, const Dims& sizes, const Group& group,
                                           const Dims& new_sizes) {
  const size_t num_dims = group.end - group.begin;
  const Dims group_sizes(sizes.begin() + group.begin, sizes.begin() + group.end);
  const Dims flat_strides = tensor::row_major_strides(group_sizes);
  const auto size = [&](size_t d) { return viewed.box.sizes[group.begin + d]; };
  const auto offset = [&](size_t d) { return viewed.box.offsets[group.begin + d]; };
  const auto stride = [&](size_t d) { return viewed.strides[group.begin + d]; };
  // Dims [first, num_dims) are a run.
  size_t first = num_dims;
  int64_t length = 1, step = 1;
  while (first > 0) {
    const size_t d = first - 1;
    if (length != flat_strides[d]) break;  // the box has only a part of the dim behind
    if (size(d) > 1) {
      if (length == 1) step = stride(d);
      if (stride(d) != step * length) break;
    }
    length *= size(d);
    --first;
  }
  std::vector<Piece> pieces;
  const Dims to(new_sizes.begin() + group.new_begin, new_sizes.begin() + group.new_end);
  const Dims to_strides = tensor::row_major_strides(to);
  Dims at(first);  // index within the box of the run
  for (;;) {
    int64_t begin = 0, in_record = 0;
    for (size_t d = 0; d < num_dims; ++d) {
      const int64_t index = d < first ? at[d] : 0;
      begin += (offset(d) + index) * flat_strides[d];
      in_record += index * stride(d);
    }
    BCP_ASSIGN_OR_RETURN(std::vector<Box> boxes, tensor::boxes_of_flat_range(to, begin, begin + length));
    if (pieces.size() + boxes.size() > kMostViewedBoxes) {
      return Status::make(Code::kUnsupported, text("more than ", kMostViewedBoxes, " pieces"));
    }
    int64_t passed = 0;
    for (Box& box : boxes) {
      Piece piece{std::move(box), in_record + passed * step, to_strides};
      for (int64_t& each : piece.strides) each *= step;
      int64_t numel = 1;
      for (const int64_t each : piece.box.sizes) numel *= each;
      passed += numel;
      pieces.push_back(std::move(piece));
    }
    size_t d = first;
    while (d > 0 && ++at[d - 1] == size(d - 1)) at[--d] = 0;
    if (d == 0) return pieces;
  }
}

/// Appends to each box in `boxes` each piece, as further dims.
base::Result<std::vector<ViewedBox>> crossed(const std::vector<ViewedBox>& boxes, const std::vector<Piece>& pieces) {
  if (boxes.size() * pieces.size() > kMostViewedBoxes) {
    return Status::make(Code::kUnsupported, text("more than ", kMostViewedBoxes, " pieces"));
  }
  std::vector<ViewedBox> out;
  out.reserve(boxes.size() * pieces.size());
  for (const ViewedBox& before : boxes) {
    for (const Piece& piece : pieces) {
      ViewedBox& next = out.emplace_back(before);
      next.offset += piece.offset;
      for (size_t d = 0; d < piece.strides.size(); ++d) {
        next.box.offsets.push_back(piece.box.offsets[d]);
        next.box.sizes.push_back(piece.box.sizes[d]);
        next.strides.push_back(piece.strides[d]);
      }
    }
  }
  return out;
}

}  // namespace

base::Result<TensorView> narrow(TensorView view, size_t dim, int64_t begin, int64_t length) {
  BCP_RETURN_IF_ERROR(check_dim(view.sizes, dim));
  int64_t end;
  if (!base::checked_add(begin, length, &end) || end > view.sizes[dim]) {
    return refuse(text(length, " elements from ", begin, " on of dim ", dim, " are not all in shape ",
                       tensor::to_text(view.sizes)));
  }
  Box wanted = tensor::whole(view.sizes);
  wanted.offsets[dim] = begin;
  wanted.sizes[dim] = length;
  view.sizes[dim] = length;
  std::vector<ViewedBox> boxes;
  for (ViewedBox& viewed : view.boxes) {
    Box common;
    if (!tensor::intersect(viewed.box, wanted, &common)) continue;
    viewed.offset += (common.offsets[dim] - viewed.box.offsets[dim]) * viewed.strides[dim];
    common.offsets[dim] -= begin;
    viewed.box = std::move(common);
    boxes.push_back(std::move(viewed));
  }
  view.boxes = std::move(boxes);
  return view;
}

base::Result<TensorView> pad(TensorView view, size_t dim, int64_t size) {
  BCP_RETURN_IF_ERROR(check_dim(view.sizes, dim));
  if (size < view.sizes[dim]) {
    return refuse(text("dim ", dim, " of shape ", tensor::to_text(view.sizes), " is longer than ", size, " already"));
  }
  view.sizes[dim] = size;
  int64_t numel;
  if (!tensor::checked_numel(view.sizes, &numel)) {
    return refuse(text("shape ", tensor::to_text(view.sizes), " overflows"));
  }
  return view;
}

base::Result<TensorView> concatenate(const std::vector<TensorView>& views, size_t dim) {
  if (views.empty()) return refuse("there is nothing to join");
  TensorView out{views.front().sizes, {}};
  BCP_RETURN_IF_ERROR(check_dim(out.sizes, dim));
  out.sizes[dim] = 0;
  for (const TensorView& view : views) {
    Dims others = view.sizes;
    if (others.size() == out.sizes.size()) others[dim] = out.sizes[dim];
    if (others != out.sizes) {
      return refuse(text("shapes ", tensor::to_text(views.front().sizes), " and ", tensor::to_text(view.sizes),
                         " cannot be joined along dim ", dim));
    }
    for (ViewedBox viewed : view.boxes) {
      viewed.box.offsets[dim] += out.sizes[dim];
      out.boxes.push_back(std::move(viewed));
    }
    if (!base::checked_add(out.sizes[dim], view.sizes[dim], &out.sizes[dim]))
      return refuse("the joined size overflows");
  }
  int64_t numel;
  return tensor::checked_numel(out.sizes, &numel) ? base::Result<TensorView>(std::move(out))
                                                  : refuse("the joined size overflows");
}

base::Result<TensorView> stack(const std::vector<TensorView>& views, size_t dim) {
  std::vector<TensorView> with_dim = views;
  for (TensorView& view : with_dim) {
    if (dim > view.sizes.size()) return refuse(text("dim ", dim, " of shape ", tensor::to_text(view.sizes)));
    if (view.sizes != views.front().sizes) {
      return refuse(text("shapes ", tensor::to_text(views.front().sizes), " and ", tensor::to_text(view.sizes),
                         " cannot be stacked"));
    }
    insert_at(&view.sizes, dim, 1);
    for (ViewedBox& viewed : view.boxes) {
      insert_at(&viewed.box.offsets, dim, 0);
      insert_at(&viewed.box.sizes, dim, 1);
      insert_at(&viewed.strides, dim, 0);
    }
  }
  return concatenate(with_dim, dim);
}

base::Result<TensorView> permute(TensorView view, const std::vector<size_t>& dims) {
  std::vector<size_t> sorted = dims;
  std::sort(sorted.begin(), sorted.end());
  bool is_permutation = sorted.size() == view.sizes.size();
  for (size_t d = 0; d < sorted.size() && is_permutation; ++d) is_permutation = sorted[d] == d;
  if (!is_permutation) return refuse(text("these are not the dims of shape ", tensor::to_text(view.sizes)));
  const auto permuted = [&](const Dims& from) {
    Dims to(from.size());
    for (size_t d = 0; d < dims.size(); ++d) to[d] = from[dims[d]];
    return to;
  };
  view.sizes = permuted(view.sizes);
  for (ViewedBox& viewed : view.boxes) {
    viewed.box = {permuted(viewed.box.offsets), permuted(viewed.box.sizes)};
    viewed.strides = permuted(viewed.strides);
  }
  return view;
}

base::Result<TensorView> reshape(const TensorView& view, const Dims& sizes) {
  int64_t old_numel, new_numel;
  if (!tensor::checked_numel(view.sizes, &old_numel) || !tensor::checked_numel(sizes, &new_numel) ||
      old_numel != new_numel) {
    return refuse(text("shape ", tensor::to_text(view.sizes), " cannot become ", tensor::to_text(sizes)));
  }
  TensorView out{sizes, {}};
  if (old_numel == 0) return out;
  const std::vector<Group> groups = groups_of(view.sizes, sizes);
  for (const ViewedBox& viewed : view.boxes) {
    if (!tensor::has_elements(viewed.box)) continue;
    std::vector<ViewedBox> cut = {{{}, viewed.source, viewed.offset, {}}};
    for (const Group& group : groups) {
      BCP_ASSIGN_OR_RETURN(const std::vector<Piece> pieces, pieces_of(viewed, view.sizes, group, sizes));
      BCP_ASSIGN_OR_RETURN(cut, crossed(cut, pieces));
    }
    if (out.boxes.size() + cut.size() > kMostViewedBoxes) {
      return Status::make(Code::kUnsupported, text("more than ", kMostViewedBoxes, " pieces"));
    }
    out.boxes.insert(out.boxes.end(), std::make_move_iterator(cut.begin()), std::make_move_iterator(cut.end()));
  }
  return out;
}

bool restride(const Dims& record_sizes, const Dims& record_strides, ViewedBox* viewed) {
  const Dims row_major = tensor::row_major_strides(record_sizes);
  Dims index(record_sizes.size());  // of the first element, then of the last one
  int64_t left = viewed->offset, offset = 0;
  for (size_t r = 0; r < record_sizes.size(); ++r) {
    index[r] = left / row_major[r];
    left %= row_major[r];
    offset += index[r] * record_strides[r];
  }
  Dims strides(viewed->strides.size());
  for (size_t d = 0; d < strides.size(); ++d) {
    if (viewed->box.sizes[d] <= 1) continue;
    bool is_found = false;
    for (size_t r = 0; r < record_sizes.size() && !is_found; ++r) {
      if (record_sizes[r] == 1 || viewed->strides[d] % row_major[r] != 0) continue;
      const int64_t step = viewed->strides[d] / row_major[r];
      const int64_t last = index[r] + step * (viewed->box.sizes[d] - 1);
      if (last >= record_sizes[r]) continue;
      is_found = true;
      index[r] = last;
      strides[d] = step * record_strides[r];
    }
    if (!is_found) return false;
  }
  viewed->offset = offset;
  viewed->strides = std::move(strides);
  return true;
}

}  // namespace bytecheckpoint::planner
