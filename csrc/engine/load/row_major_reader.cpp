// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/row_major_reader.h"

#include <cstring>
#include <optional>
#include <utility>

#include "csrc/engine/coverage.h"
#include "csrc/tensor/flat_range.h"

namespace bytecheckpoint::engine {

using base::Code;
using base::Status;
using base::text;

namespace {

Status refuse_key(Code code, const std::string& fqn, std::string_view why) {
  return Status::make(code, text("'", fqn, "': ", why));
}

}  // namespace

Status RowMajorReader::locate(const std::vector<std::string>& fqns) {
  CoverageCheck coverage;
  std::vector<ChunkInRecord> chunks;
  std::vector<const format::Chunk*> all;
  for (const std::string& fqn : fqns) {
    Tensor tensor;
    tensor.item = checkpoint_->find(fqn);
    if (tensor.item == nullptr || !tensor.item->is_tensor) {
      return refuse_key(Code::kInvalidArgument, fqn, "the checkpoint has no such tensor");
    }
    tensor.is_padded = view_ != nullptr && view_->pads(*tensor.item);
    if (tensor.is_padded) tensor.dtype = tensor.item->tensor.dtype;  // perhaps all of it is padding
    if (!tensor.is_padded && coverage.has_gap(*tensor.item)) {
      return refuse_key(Code::kInvalidArgument, fqn, "some of its elements are in no chunk");
    }
    if (!tensor::checked_numel(tensor.item->tensor.sizes, &tensor.numel)) {
      return refuse_key(Code::kInvalidArgument, fqn, "impossible shape");
    }
    for (size_t c = 0; c < tensor.item->chunks.size(); ++c) {
      chunks.push_back({&tensor.item->chunks[c], view_ == nullptr ? nullptr : view_->find(*tensor.item, c)});
      all.push_back(&tensor.item->chunks[c]);
    }
    tensors_.push_back(std::move(tensor));
  }
  Status outcome = check_extents(directory_, *checkpoint_, all);
  if (!outcome.is_ok()) return job_.explain(std::move(outcome));
  auto places = locate_tensors(directory_, *checkpoint_, chunks);
  if (!places.is_ok()) return job_.explain(places.status());
  size_t next = 0;
  for (Tensor& tensor : tensors_) {
    for (size_t c = 0; c < tensor.item->chunks.size(); ++c, ++next) {
      std::optional<TensorPlace>& place = places.value()[next];
      if (!place.has_value()) {
        return refuse_key(Code::kUnsupported, tensor.item->fqn, "it is not stored as plain elements");
      }
      if (c == 0) tensor.dtype = place->dtype;
      if (place->dtype != tensor.dtype) {
        return refuse_key(Code::kUnsupported, tensor.item->fqn, "its chunks have different dtypes");
      }
      tensor.places.push_back(std::move(*place));
    }
  }
  return Status::ok();
}

Status RowMajorReader::want(size_t tensor, int64_t first, int64_t last, uint8_t* to) {
  const Tensor& from = tensors_[tensor];
  const format::Item& item = *from.item;
  BCP_ASSIGN_OR_RETURN(const std::vector<tensor::Box> boxes,
                       tensor::boxes_of_flat_range(item.tensor.sizes, first, last));
  if (boxes.empty()) return Status::ok();
  const int64_t itemsize = tensor::find_dtype(from.dtype)->itemsize_bytes;
  if (from.is_padded) std::memset(to, 0, static_cast<size_t>((last - first) * itemsize));
  for (const tensor::Box& box : boxes) {
    tensor::StridedView memory{to, from.dtype, box.sizes, tensor::row_major_strides(box.sizes)};
    for (int64_t& stride : memory.strides_bytes) stride *= itemsize;
    for (size_t c = 0; c < item.chunks.size(); ++c) {
      const format::Chunk& chunk = item.chunks[c];
      tensor::Box common;
      if (!tensor::intersect(chunk.box, box, &common)) continue;
      tensor::Dims within = common.offsets;
      for (size_t d = 0; d < within.size(); ++d) {
        within[d] -= box.offsets[d];
        common.offsets[d] -= chunk.box.offsets[d];
      }
      BCP_RETURN_IF_ERROR(job_.destinations().add_tensor(item.fqn, chunk, from.places[c], common,
                                                         tensor::part_of(memory, within, common.sizes)));
    }
    int64_t numel = 0;
    (void)tensor::checked_numel(box.sizes, &numel);
    to += numel * itemsize;
  }
  return Status::ok();
}

base::Result<const format::Record*> RowMajorReader::object(const std::string& fqn) const {
  const format::Item* item = checkpoint_->find(fqn);
  if (item == nullptr || item->is_tensor || item->chunks.size() != 1) {
    return refuse_key(Code::kInvalidArgument, fqn, "the checkpoint has no such object");
  }
  Status outcome = check_extents(directory_, *checkpoint_, {&item->chunks.front()});
  if (!outcome.is_ok()) return job_.explain(std::move(outcome));
  return &item->chunks.front().record;
}

}  // namespace bytecheckpoint::engine
