// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/checkpoint_view.h"

#include <algorithm>

#include "csrc/planner/coverage.h"
#include "csrc/staging/dequantize.h"
#include "csrc/tensor/small_floats.h"

namespace bytecheckpoint::engine {

using base::Code;
using base::Status;
using base::text;

namespace {

using tensor::DType;

/// Returns the tensor of which each byte is two elements, along the last dim.
base::Result<planner::TensorView> unpacked(planner::TensorView view) {
  tensor::Dims sizes = view.sizes;
  if (sizes.empty()) return Status::make(Code::kInvalidArgument, "a scalar is no pair of elements");
  view.sizes.push_back(2);
  int64_t numel;
  if (!tensor::checked_numel(view.sizes, &numel)) {
    return Status::make(Code::kInvalidArgument, text("shape ", tensor::to_text(view.sizes), " overflows"));
  }
  if (!base::checked_mul(sizes.back(), 2, &sizes.back()) || numel == 0) return planner::TensorView{sizes, {}};
  for (planner::ViewedBox& viewed : view.boxes) {
    viewed.offset *= 2;
    for (int64_t& stride : viewed.strides) stride *= 2;
    viewed.box.offsets.push_back(0);
    viewed.box.sizes.push_back(2);
    viewed.strides.push_back(1);
  }
  return planner::reshape(view, sizes);
}

/// Whether the codes of a box are whole bytes along one dim, or the same half of each byte.
bool keeps_pairs(const planner::ViewedBox& viewed) {
  for (size_t d = 0; d < viewed.strides.size(); ++d) {
    if (viewed.box.sizes[d] > 1 && viewed.strides[d] != 1 && viewed.strides[d] % 2 != 0) return false;
  }
  return true;
}

/// Returns which elements of a tensor are in no box, as `planner::find_gap` does.
std::string gap_of(const planner::TensorView& view) {
  planner::BoxNumbers there;
  for (const planner::ViewedBox& viewed : view.boxes) there.add(viewed.box);
  return planner::find_gap(there.boxes(view.sizes.size()), tensor::whole(view.sizes), view.sizes);
}

Status check_scales(const tensor::Dims& sizes, const tensor::Dims& block, const CheckpointViewBuilder::Tensor& scales) {
  bool fits = block.size() == sizes.size() && scales.view.sizes.size() == sizes.size();
  for (size_t d = 0; d < sizes.size() && fits; ++d) {
    fits = block[d] >= 1 && scales.view.sizes[d] == sizes[d] / block[d] + (sizes[d] % block[d] != 0 ? 1 : 0);
  }
  if (!fits) {
    return Status::make(Code::kInvalidArgument,
                        text("scales of shape ", tensor::to_text(scales.view.sizes), " are not one for each block of ",
                             tensor::to_text(block), " of ", tensor::to_text(sizes)));
  }
  const std::string gap = gap_of(scales.view);
  if (gap.empty()) return Status::ok();
  return Status::make(Code::kInvalidArgument, text("of the scales, ", gap, " in no stored chunk"));
}

}  // namespace

int64_t bytes_made_of_one(const ChunkInRecord& chunk) {
  if (chunk.view == nullptr || chunk.view->quantized == nullptr) return 1;
  const Dequantization& how = *chunk.view->quantized->how;
  return tensor::find_dtype(how.values)->itemsize_bytes * (how.codes == DType::kFloat4E2M1FNX2 ? 2 : 1);
}

base::Result<const format::Item*> CheckpointViewBuilder::find(const std::string& fqn) const {
  if (const format::Item* item = stored_->find(fqn); item != nullptr) return item;
  return Status::make(Code::kInvalidArgument, text("'", fqn, "': the checkpoint has no such key"));
}

base::Result<CheckpointViewBuilder::Tensor> CheckpointViewBuilder::tensor(const std::string& fqn) {
  BCP_ASSIGN_OR_RETURN(const format::Item* item, find(fqn));
  if (!item->is_tensor) return Status::make(Code::kInvalidArgument, text("'", fqn, "': it is an object, not a tensor"));
  Tensor out{item->tensor, item->is_partial, false, {item->tensor.sizes, {}}};
  for (const format::Chunk& chunk : item->chunks) {
    out.view.boxes.push_back(
        {chunk.box, static_cast<uint32_t>(sources_.size()), 0, tensor::row_major_strides(chunk.box.sizes)});
    sources_.push_back({&chunk, nullptr});
  }
  return out;
}

base::Result<CheckpointViewBuilder::Tensor> CheckpointViewBuilder::joined(const std::vector<Tensor>& parts, size_t dim,
                                                                          bool is_stack) {
  if (parts.empty()) return Status::make(Code::kInvalidArgument, "there is nothing to join");
  Tensor out = parts.front();
  std::vector<planner::TensorView> views;
  for (const Tensor& part : parts) {
    if (part.info.dtype != out.info.dtype) {
      return Status::make(Code::kInvalidArgument, text("dtypes ", tensor::find_dtype(out.info.dtype)->name, " and ",
                                                       tensor::find_dtype(part.info.dtype)->name, " cannot be joined"));
    }
    out.is_partial = out.is_partial || part.is_partial;
    out.is_padded = out.is_padded || part.is_padded;
    out.info.requires_grad = out.info.requires_grad || part.info.requires_grad;
    views.push_back(part.view);
  }
  BCP_ASSIGN_OR_RETURN(out.view, is_stack ? planner::stack(views, dim) : planner::concatenate(views, dim));
  return out;
}

base::Result<CheckpointViewBuilder::Tensor> CheckpointViewBuilder::padded(const Tensor& tensor, size_t dim,
                                                                          int64_t size) {
  if (const std::string gap = tensor.is_padded ? std::string() : gap_of(tensor.view); !gap.empty()) {
    return Status::make(Code::kInvalidArgument, text("of what is to be padded, ", gap, " in no stored chunk"));
  }
  Tensor out = tensor;
  BCP_ASSIGN_OR_RETURN(out.view, planner::pad(tensor.view, dim, size));
  out.is_padded = true;
  return out;
}

base::Result<CheckpointViewBuilder::Tensor> CheckpointViewBuilder::dequantized(const Tensor& codes,
                                                                               const Tensor& scales,
                                                                               const tensor::Dims& block, DType values,
                                                                               bool is_packed) {
  const auto refuse = [](const char* what, DType dtype) {
    const tensor::DTypeInfo* info = tensor::find_dtype(dtype);
    return Status::make(Code::kInvalidArgument, text(info == nullptr ? "this" : info->name, " is no dtype ", what));
  };
  auto how = std::make_shared<Dequantization>();
  how->stored = codes.info.dtype;
  how->codes = is_packed ? DType::kFloat4E2M1FNX2 : how->stored;
  how->values = values;
  how->block = block;
  how->scale_dtype = scales.info.dtype;
  how->scale_sizes = scales.view.sizes;
  is_packed = how->codes == DType::kFloat4E2M1FNX2;
  const int64_t itemsize = tensor::find_dtype(how->stored)->itemsize_bytes;
  if (!tensor::is_small_float(how->codes) || itemsize != 1) return refuse("of quantized elements", how->stored);
  if (!tensor::is_scale_dtype(how->scale_dtype)) return refuse("of scales", how->scale_dtype);
  if (!staging::is_value_dtype(values)) return refuse("to dequantize to", values);
  Tensor out = codes;
  out.info.dtype = values;
  if (is_packed) {
    BCP_ASSIGN_OR_RETURN(out.view, unpacked(std::move(out.view)));
  }
  BCP_RETURN_IF_ERROR(check_scales(out.view.sizes, block, scales));
  for (const planner::ViewedBox& viewed : scales.view.boxes) {
    auto [chunk, view] = placed(viewed);
    if (view.quantized != nullptr) return Status::make(Code::kInvalidArgument, "the scales are quantized themselves");
    how->scale_chunks.push_back(std::move(chunk));
    how->scale_views.push_back(std::move(view));
  }
  for (planner::ViewedBox& viewed : out.view.boxes) {
    const format::Chunk* chunk = sources_[viewed.source].chunk;
    viewed.source = static_cast<uint32_t>(sources_.size());
    sources_.push_back({chunk, std::make_shared<QuantizedChunk>(QuantizedChunk{how, viewed})});
  }
  return out;
}

std::pair<format::Chunk, RecordView> CheckpointViewBuilder::placed(planner::ViewedBox viewed) const {
  const Source& source = sources_[viewed.source];
  RecordView view{source.chunk->box.sizes, viewed.offset, std::move(viewed.strides), source.quantized};
  return std::make_pair(format::Chunk{std::move(viewed.box), source.chunk->record}, std::move(view));
}

Status CheckpointViewBuilder::add(std::string fqn, Tensor made) {
  Added added;
  added.is_padded = made.is_padded;
  format::Item& item = added.item;
  item.fqn = std::move(fqn);
  item.is_tensor = true;
  item.is_partial = made.is_partial;
  item.ordinal = static_cast<uint32_t>(added_.size());
  item.tensor = std::move(made.info);
  item.tensor.sizes = std::move(made.view.sizes);
  for (planner::ViewedBox& viewed : made.view.boxes) {
    const QuantizedChunk* quantized = sources_[viewed.source].quantized.get();
    if (quantized != nullptr && quantized->how->codes == DType::kFloat4E2M1FNX2 && !keeps_pairs(viewed)) {
      return Status::make(Code::kUnsupported, text("'", item.fqn, "': a dim with pairs of 4-bit codes was cut into ",
                                                   "parts of an odd size, which is not supported"));
    }
    auto [chunk, view] = placed(std::move(viewed));
    item.chunks.push_back(std::move(chunk));
    added.views.push_back(std::move(view));
  }
  added_.push_back(std::move(added));
  return Status::ok();
}

Status CheckpointViewBuilder::keep(std::string fqn, const std::string& stored) {
  BCP_ASSIGN_OR_RETURN(const format::Item* item, find(stored));
  added_.push_back({*item, {}, false});
  added_.back().item.fqn = std::move(fqn);
  return Status::ok();
}

base::Result<std::shared_ptr<const CheckpointView>> CheckpointViewBuilder::finish() {
  std::stable_sort(added_.begin(), added_.end(),
                   [](const Added& a, const Added& b) { return a.item.fqn < b.item.fqn; });
  const auto twice = std::adjacent_find(added_.begin(), added_.end(),
                                        [](const Added& a, const Added& b) { return a.item.fqn == b.item.fqn; });
  if (twice != added_.end()) {
    return Status::make(Code::kInvalidArgument, text("'", twice->item.fqn, "': two sources for one key"));
  }
  auto made = std::make_shared<CheckpointView>();
  CheckpointView& out = *made;
  out.stored = stored_;
  out.manifest.foreign = stored_->foreign;
  out.manifest.save_id = stored_->save_id;
  out.manifest.checkpoint_id = stored_->checkpoint_id;
  out.manifest.files = stored_->files;
  out.manifest.user_metadata = stored_->user_metadata;
  out.manifest.items.reserve(added_.size());
  out.record_views.reserve(added_.size());
  for (Added& added : added_) {
    out.manifest.items.push_back(std::move(added.item));
    out.record_views.push_back(std::move(added.views));
    out.is_padded.push_back(added.is_padded);
  }
  added_.clear();
  return std::shared_ptr<const CheckpointView>(std::move(made));
}

}  // namespace bytecheckpoint::engine
