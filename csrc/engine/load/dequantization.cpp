// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/dequantization.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "csrc/io/directory.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;
using tensor::Box;
using tensor::Dims;
using tensor::DType;

bool is_packed(const Dequantization& how) {
  return how.codes == DType::kFloat4E2M1FNX2;
}

/// Returns the dims with the longest stride first.
std::vector<size_t> descending(const Dims& strides) {
  std::vector<size_t> order(strides.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return strides[a] > strides[b]; });
  return order;
}

Dims in_order(const Dims& dims, const std::vector<size_t>& order) {
  Dims out(order.size());
  for (size_t d = 0; d < order.size(); ++d) out[d] = dims[order[d]];
  return out;
}

/// Returns the codes of a box, without the memory of their values.
staging::WantedCodes codes_of(const TensorPlace& place, const Box& box, std::vector<size_t>* order) {
  *order = descending(place.strides);
  staging::WantedCodes wanted;
  wanted.first = place.codes->first;
  for (size_t d = 0; d < box.num_dims(); ++d) wanted.first += box.offsets[d] * place.strides[d];
  wanted.sizes = in_order(box.sizes, *order);
  wanted.strides = in_order(place.strides, *order);
  return wanted;
}

/// Splits a number of codes into steps along the dims of the quantized box, longest strides first.
Dims steps_of(int64_t codes, const planner::ViewedBox& quantized) {
  Dims steps(quantized.strides.size());
  for (const size_t d : descending(quantized.strides)) {
    if (quantized.box.sizes[d] <= 1) continue;
    steps[d] = codes / quantized.strides[d];
    codes -= steps[d] * quantized.strides[d];
  }
  return steps;
}

/// The smallest and the largest index that codes of a box have in each dim of the quantized box.
struct IndexRange {
  Dims first, last;
};

IndexRange indices_of(const TensorPlace& place, const Box& box) {
  const planner::ViewedBox& quantized = place.codes->quantized;
  std::vector<size_t> order;
  const staging::WantedCodes wanted = codes_of(place, box, &order);
  IndexRange range;
  range.first = steps_of(wanted.first - quantized.offset, quantized);
  range.last = range.first;
  int64_t last_code = wanted.first - quantized.offset;
  for (size_t d = 0; d < wanted.sizes.size(); ++d) {
    if (wanted.sizes[d] == 1) continue;
    const Dims steps = steps_of(wanted.strides[d], quantized);
    for (size_t q = 0; q < steps.size(); ++q) range.last[q] += steps[q] * (wanted.sizes[d] - 1);
    last_code += wanted.strides[d] * (wanted.sizes[d] - 1);
  }
  bool carries = false;
  for (size_t q = 0; q < range.last.size(); ++q) carries = carries || range.last[q] >= quantized.box.sizes[q];
  if (!carries) return range;
  // Some dim of the box goes on from row to row. All codes lie between the first and the last one.
  range.last = steps_of(last_code, quantized);
  bool is_same = true;
  for (const size_t q : descending(quantized.strides)) {
    if (!is_same) {
      range.first[q] = 0;
      range.last[q] = quantized.box.sizes[q] - 1;
    }
    is_same = is_same && range.first[q] == range.last[q];
  }
  return range;
}

}  // namespace

Status locate_scales(const std::string& directory, const format::Manifest& manifest,
                     const std::vector<ChunkInRecord>& chunks, std::vector<std::optional<TensorPlace>>* places) {
  std::map<const Dequantization*, size_t> first;  // of its chunks in `scales`
  std::vector<ChunkInRecord> scales;
  std::vector<const format::Chunk*> all;
  for (const ChunkInRecord& chunk : chunks) {
    if (chunk.view == nullptr || chunk.view->quantized == nullptr) continue;
    const Dequantization& how = *chunk.view->quantized->how;
    if (!first.emplace(&how, scales.size()).second) continue;
    for (size_t c = 0; c < how.scale_chunks.size(); ++c) {
      scales.push_back({&how.scale_chunks[c], &how.scale_views[c]});
      all.push_back(&how.scale_chunks[c]);
    }
  }
  if (first.empty()) return Status::ok();
  BCP_RETURN_IF_ERROR(check_extents(directory, manifest, all));
  BCP_ASSIGN_OR_RETURN(const auto found, locate_tensors(directory, manifest, scales));
  std::map<const Dequantization*, std::shared_ptr<const std::vector<TensorPlace>>> shared;
  for (const auto& [how, begin] : first) {
    auto of_one = std::make_shared<std::vector<TensorPlace>>();
    for (size_t s = begin; s < begin + how->scale_chunks.size(); ++s) {
      if (!found[s].has_value() || found[s]->dtype != how->scale_dtype) {
        const format::Record& record = scales[s].chunk->record;
        return Status::make(Code::kUnsupported, text("the scales are not stored as plain elements of ",
                                                     tensor::find_dtype(how->scale_dtype)->name))
            .at(record.offset, record.bytes)
            .in_file(io::join(directory, manifest.files[record.file].name));
      }
      of_one->push_back(*found[s]);
    }
    shared.emplace(how, std::move(of_one));
  }
  for (std::optional<TensorPlace>& place : *places) {
    if (!place.has_value() || place->codes == nullptr) continue;
    auto codes = std::make_shared<PlacedCodes>(*place->codes);
    codes->scales = shared[codes->how.get()];
    place->codes = std::move(codes);
  }
  return Status::ok();
}

Status place_codes(const RecordView& view, const Dims& sizes, TensorPlace* place) {
  const QuantizedChunk& chunk = *view.quantized;
  auto codes = std::make_shared<PlacedCodes>();
  codes->how = chunk.how;
  codes->quantized = chunk.box;
  planner::ViewedBox viewed{tensor::whole(sizes), 0, view.offset, view.strides};
  if (place->dtype != chunk.how->stored) {
    return Status::make(Code::kUnsupported, text("the record is ", tensor::find_dtype(place->dtype)->name, ", but ",
                                                 tensor::find_dtype(chunk.how->stored)->name, " is to be dequantized"));
  }
  Dims record_sizes = view.record_sizes, record_strides = place->strides;
  if (is_packed(*chunk.how)) {
    for (int64_t& stride : record_strides) stride *= 2;
    record_sizes.push_back(2);
    record_strides.push_back(1);
  }
  const Dims row_major = tensor::row_major_strides(record_sizes);
  bool is_row_major = true;
  for (size_t d = 0; d < record_sizes.size(); ++d) {
    is_row_major = is_row_major && (record_sizes[d] <= 1 || record_strides[d] == row_major[d]);
  }
  if (!is_row_major && !(planner::restride(record_sizes, record_strides, &viewed) &&
                         planner::restride(record_sizes, record_strides, &codes->quantized))) {
    return Status::make(Code::kUnsupported,
                        text("a transform joins dims of a record of ", tensor::to_text(view.record_sizes),
                             " whose elements are not stored in row-major order"));
  }
  int64_t numel = 0, record_numel = 0;
  const bool is_all = tensor::checked_numel(sizes, &numel) && tensor::checked_numel(record_sizes, &record_numel) &&
                      numel == record_numel;
  place->fills_stretch = place->fills_stretch && is_all;
  codes->first = viewed.offset;
  place->dtype = chunk.how->values;
  place->strides = std::move(viewed.strides);
  place->codes = std::move(codes);
  return Status::ok();
}

planner::WantedBox wanted_codes_of(const format::Chunk& chunk, const TensorPlace& place, const Box& box) {
  std::vector<size_t> order;
  staging::WantedCodes codes = codes_of(place, box, &order);
  planner::WantedBox wanted{chunk.record.file, place.data_offset, codes.sizes, codes.strides, 1};
  if (!tensor::has_elements(box)) return wanted;
  wanted.offset += codes.first;
  if (!is_packed(*place.codes->how)) return wanted;
  wanted.offset = place.data_offset + codes.first / 2;
  for (size_t d = 0; d < wanted.sizes.size(); ++d) {
    int64_t& stride = wanted.strides_bytes[d];
    if (stride == 1 && wanted.sizes[d] > 1) {
      wanted.sizes[d] = (codes.first % 2 + wanted.sizes[d] + 1) / 2;  // the bytes that hold them
    } else {
      stride /= 2;
    }
  }
  return wanted;
}

Box scale_box_of(const TensorPlace& place, const Box& box) {
  const Dequantization& how = *place.codes->how;
  Box scales{Dims(how.block.size()), Dims(how.block.size())};
  if (!tensor::has_elements(box)) return scales;
  const IndexRange range = indices_of(place, box);
  const Box& quantized = place.codes->quantized.box;
  for (size_t d = 0; d < how.block.size(); ++d) {
    scales.offsets[d] = (quantized.offsets[d] + range.first[d]) / how.block[d];
    scales.sizes[d] = (quantized.offsets[d] + range.last[d]) / how.block[d] + 1 - scales.offsets[d];
  }
  return scales;
}

staging::Dequantizer dequantizer_of(const TensorPlace& place, const Box& box, const Box& scale_box,
                                    const tensor::StridedView& memory) {
  const PlacedCodes& codes = *place.codes;
  const Dequantization& how = *codes.how;
  std::vector<size_t> order;
  staging::WantedCodes wanted = codes_of(place, box, &order);
  wanted.memory_strides = in_order(memory.strides_bytes, order);
  wanted.memory = memory.data;
  staging::CodeLayout layout{{how.codes, how.scale_dtype, how.values}, codes.quantized.offset, {}};
  const Dims scale_strides = tensor::row_major_strides(scale_box.sizes);
  for (const size_t d : descending(codes.quantized.strides)) {
    layout.dims.push_back({codes.quantized.strides[d], codes.quantized.box.sizes[d], codes.quantized.box.offsets[d],
                           how.block[d], scale_box.offsets[d], scale_strides[d]});
  }
  return staging::Dequantizer(std::move(layout), wanted);
}

}  // namespace bytecheckpoint::engine
