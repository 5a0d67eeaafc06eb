// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/checkpoint_view.h"

#include <algorithm>

namespace bytecheckpoint::engine {

using base::Code;
using base::Status;
using base::text;

base::Result<const format::Item*> CheckpointViewBuilder::find(const std::string& fqn) const {
  if (const format::Item* item = stored_->find(fqn); item != nullptr) return item;
  return Status::make(Code::kInvalidArgument, text("'", fqn, "': the checkpoint has no such key"));
}

base::Result<CheckpointViewBuilder::Tensor> CheckpointViewBuilder::tensor(const std::string& fqn) {
  BCP_ASSIGN_OR_RETURN(const format::Item* item, find(fqn));
  if (!item->is_tensor) return Status::make(Code::kInvalidArgument, text("'", fqn, "': it is an object, not a tensor"));
  Tensor out{item->tensor, item->is_partial, {item->tensor.sizes, {}}};
  for (const format::Chunk& chunk : item->chunks) {
    out.view.boxes.push_back(
        {chunk.box, static_cast<uint32_t>(sources_.size()), 0, tensor::row_major_strides(chunk.box.sizes)});
    sources_.push_back(&chunk);
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
    out.info.requires_grad = out.info.requires_grad || part.info.requires_grad;
    views.push_back(part.view);
  }
  BCP_ASSIGN_OR_RETURN(out.view, is_stack ? planner::stack(views, dim) : planner::concatenate(views, dim));
  return out;
}

void CheckpointViewBuilder::add(std::string fqn, Tensor made) {
  Added added;
  format::Item& item = added.item;
  item.fqn = std::move(fqn);
  item.is_tensor = true;
  item.is_partial = made.is_partial;
  item.ordinal = static_cast<uint32_t>(added_.size());
  item.tensor = std::move(made.info);
  item.tensor.sizes = std::move(made.view.sizes);
  for (planner::ViewedBox& viewed : made.view.boxes) {
    const format::Chunk& source = *sources_[viewed.source];
    item.chunks.push_back({std::move(viewed.box), source.record});
    added.views.push_back({source.box.sizes, viewed.offset, std::move(viewed.strides)});
  }
  added_.push_back(std::move(added));
}

Status CheckpointViewBuilder::keep(std::string fqn, const std::string& stored) {
  BCP_ASSIGN_OR_RETURN(const format::Item* item, find(stored));
  added_.push_back({*item, {}});
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
  }
  added_.clear();
  return std::shared_ptr<const CheckpointView>(std::move(made));
}

}  // namespace bytecheckpoint::engine
