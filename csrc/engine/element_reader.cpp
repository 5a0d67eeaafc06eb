// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/element_reader.h"

#include <optional>
#include <utility>

#include "csrc/tensor/flat_range.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

Status cannot_read(Code code, const std::string& fqn, const std::string& why) {
  return Status::make(code, text("'", fqn, "': ", why));
}

}  // namespace

base::Result<ElementReader::Source> ElementReader::source_of(const TensorToRead& tensor,
                                                             CoverageCheck* coverage) const {
  Source source;
  source.item = checkpoint_->find(tensor.fqn);
  const tensor::DTypeInfo* info = tensor::find_plain_dtype(tensor.dtype);
  const auto refuse = [&](const std::string& why) { return cannot_read(Code::kInvalidArgument, tensor.fqn, why); };
  if (source.item == nullptr || !source.item->is_tensor) return refuse("the checkpoint has no such tensor");
  if (info == nullptr) return refuse("the dtype that is wanted is not plain");
  if (coverage->has_gap(*source.item)) return refuse("some of its elements are in no chunk");
  if (!tensor::checked_numel(source.item->tensor.sizes, &source.numel)) return refuse("impossible shape");
  source.dtype = tensor.dtype;
  source.itemsize = info->itemsize_bytes;
  return source;
}

Status ElementReader::locate(const std::vector<TensorToRead>& tensors) {
  CoverageCheck coverage;
  std::vector<ChunkInRecord> chunks;
  std::vector<const format::Chunk*> all;
  for (const TensorToRead& tensor : tensors) {
    BCP_ASSIGN_OR_RETURN(Source source, source_of(tensor, &coverage));
    for (size_t c = 0; c < source.item->chunks.size(); ++c) {
      chunks.push_back({&source.item->chunks[c], view_ == nullptr ? nullptr : view_->find(*source.item, c)});
      all.push_back(&source.item->chunks[c]);
    }
    sources_.push_back(std::move(source));
  }
  const std::string& directory = job_.options().directory;
  Status outcome = check_extents(directory, *checkpoint_, all);
  if (!outcome.is_ok()) return job_.explain(std::move(outcome));
  auto places = locate_tensors(directory, *checkpoint_, chunks);
  if (!places.is_ok()) return job_.explain(places.status());
  size_t next = 0;
  for (Source& source : sources_) {
    for (size_t c = 0; c < source.item->chunks.size(); ++c, ++next) {
      std::optional<TensorPlace>& place = places.value()[next];
      if (!place.has_value()) {
        return cannot_read(Code::kUnsupported, source.item->fqn, "it is not stored as plain elements");
      }
      source.places.push_back(std::move(*place));
      if (source.places.back().dtype == source.stored_dtype()) continue;
      return cannot_read(Code::kUnsupported, source.item->fqn, "its chunks have different dtypes");
    }
  }
  return Status::ok();
}

Status ElementReader::want(size_t tensor, int64_t first, int64_t last, uint8_t* to) {
  const Source& source = sources_[tensor];
  if (first == last) return Status::ok();
  if (source.stored_dtype() != source.dtype) {
    const int64_t stored_itemsize = tensor::find_dtype(source.stored_dtype())->itemsize_bytes;
    std::vector<uint8_t> elements(static_cast<size_t>((last - first) * stored_itemsize));
    to_convert_.push_back({source.stored_dtype(), source.dtype, std::move(elements), to, last - first});
    to = to_convert_.back().elements.data();
  }
  return want_stored(source, first, last, to);
}

Status ElementReader::want_stored(const Source& source, int64_t first, int64_t last, uint8_t* to) {
  const format::Item& item = *source.item;
  const int64_t itemsize = tensor::find_dtype(source.stored_dtype())->itemsize_bytes;
  BCP_ASSIGN_OR_RETURN(const std::vector<tensor::Box> boxes,
                       tensor::boxes_of_flat_range(item.tensor.sizes, first, last));
  for (const tensor::Box& box : boxes) {
    tensor::StridedView memory{to, source.stored_dtype(), box.sizes, tensor::row_major_strides(box.sizes)};
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
      BCP_RETURN_IF_ERROR(job_.destinations().add_tensor(item.fqn, chunk, source.places[c], common,
                                                         tensor::part_of(memory, within, common.sizes)));
    }
    int64_t numel = 0;
    (void)tensor::checked_numel(box.sizes, &numel);
    to += numel * itemsize;
  }
  return Status::ok();
}

Status ElementReader::run(const std::function<bool()>& cancelled) {
  const base::Result<LoadStats> read = job_.run(cancelled);
  const std::vector<ToConvert> to_convert = std::exchange(to_convert_, {});
  if (!read.is_ok()) return read.status();
  for (const ToConvert& each : to_convert) {
    BCP_RETURN_IF_ERROR(convert_(each.from, each.elements.data(), each.to, each.converted, each.count));
  }
  return Status::ok();
}

base::Result<std::string> ElementReader::read_record(const format::Record& record,
                                                     const std::function<bool()>& cancelled) {
  std::string bytes(static_cast<size_t>(record.bytes), '\0');
  job_.destinations().add_bytes(record, reinterpret_cast<uint8_t*>(bytes.data()));
  BCP_RETURN_IF_ERROR(run(cancelled));
  return bytes;
}

}  // namespace bytecheckpoint::engine
