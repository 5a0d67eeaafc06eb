// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/load_phases.h"

#include <utility>

#include "csrc/engine/load/dequantization.h"
#include "csrc/engine/load/wanted_box.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::engine {
namespace {

/// With so many pieces of a slot, or so long ones, a kernel of a device is no slower than its link.
constexpr int64_t kFewRuns = 4096;
constexpr int64_t kLongRunBytes = 256;

int64_t scale_bytes_of(const TensorPlace& place, const tensor::Box& scale_box) {
  int64_t numel = 0;
  (void)tensor::checked_numel(scale_box.sizes, &numel);
  return numel * tensor::find_dtype(place.codes->how->scale_dtype)->itemsize_bytes;
}

std::vector<tensor::Box> halves(const tensor::Box& box, size_t dim) {
  std::vector<tensor::Box> parts(2, box);
  parts[0].sizes[dim] = box.sizes[dim] / 2;
  parts[1].sizes[dim] -= parts[0].sizes[dim];
  parts[1].offsets[dim] += parts[0].sizes[dim];
  return parts;
}

/// Returns the dim along which a box is best cut, so that each half needs fewer scales; nothing if none helps.
std::optional<size_t> dim_to_halve(const TensorPlace& place, const tensor::Box& box) {
  std::optional<size_t> best;
  int64_t fewest = scale_bytes_of(place, scale_box_of(place, box));
  for (size_t d = 0; d < box.num_dims(); ++d) {
    if (box.sizes[d] < 2) continue;
    const int64_t bytes = scale_bytes_of(place, scale_box_of(place, halves(box, d)[1]));
    if (bytes < fewest) {
      fewest = bytes;
      best = d;
    }
  }
  return best;
}

/// Whether a device is given a box in few pieces: all of it lies together in the file, or its rows are long.
bool suits_devices(const TensorPlace& place, const tensor::BoxRuns& runs) {
  if (place.codes != nullptr || cuts_elements(place)) return false;
  return runs.lie_together() || runs.run_bytes() >= kLongRunBytes || runs.num_runs() <= kFewRuns;
}

}  // namespace

void LoadPhases::add_plain(const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box,
                           const tensor::StridedView& memory) {
  add_to(&first(), chunk, place, box, memory.strides_bytes, {{}, memory.data});
}

bool LoadPhases::add_on_device(const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box,
                               const tensor::StridedView& memory, int device) {
  const planner::WantedBox wanted = wanted_of(chunk, place, box);
  const tensor::Dims strides_bytes = in_stored_order(place, memory.strides_bytes);
  Destination to;
  to.runs = tensor::BoxRuns::of_strides(wanted.sizes, wanted.strides_bytes, wanted.itemsize_bytes, strides_bytes);
  if (!suits_devices(place, to.runs)) return false;
  to.stretch = stretch_of(chunk, place, box);
  to.on_device = std::make_unique<Destination::OnDevice>(
      Destination::OnDevice{device, {memory.data, memory.dtype, wanted.sizes, strides_bytes}});
  first().wanted.push_back(wanted);
  first().destinations.push_back(std::move(to));
  return true;
}

void LoadPhases::add_to(LoadPhase* phase, const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box,
                        const tensor::Dims& memory_strides_bytes, Destination to) {
  phase->wanted.push_back(wanted_of(chunk, place, box));
  tensor::Dims strides_bytes = in_stored_order(place, memory_strides_bytes);
  if (cuts_elements(place) && tensor::has_elements(box)) strides_bytes.push_back(1);
  const planner::WantedBox& wanted = phase->wanted.back();
  to.runs = tensor::BoxRuns::of_strides(wanted.sizes, wanted.strides_bytes, wanted.itemsize_bytes, strides_bytes);
  to.stretch = stretch_of(chunk, place, box);
  phase->destinations.push_back(std::move(to));
}

void LoadPhases::add_quantized(const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box,
                               const tensor::StridedView& memory) {
  const tensor::Box scale_box = scale_box_of(place, box);
  auto scales = std::make_shared<Scales>();
  scales->bytes = scale_bytes_of(place, scale_box);
  if (scales->bytes > kMostScaleBytes) {
    if (const std::optional<size_t> dim = dim_to_halve(place, box); dim.has_value()) {
      for (const tensor::Box& part : halves(box, *dim)) {
        tensor::Dims begin(box.num_dims());
        begin[*dim] = part.offsets[*dim] - box.offsets[*dim];
        add_quantized(chunk, place, part, tensor::part_of(memory, begin, part.sizes));
      }
      return;
    }
  }
  if (phases_[scales_phase_].scale_bytes > 0 && phases_[scales_phase_].scale_bytes + scales->bytes > kMostScaleBytes) {
    ++scales_phase_;
  }
  if (phases_.size() < scales_phase_ + 2) phases_.emplace_back();
  add_scales(place, scale_box, scales);
  LoadPhase& phase = phases_[scales_phase_ + 1];
  phase.wanted.push_back(wanted_of(chunk, place, box));
  const planner::WantedBox& wanted = phase.wanted.back();
  Destination to;
  to.runs = tensor::BoxRuns::of_strides(wanted.sizes, wanted.strides_bytes, 1, wanted.strides_bytes);
  to.stretch = stretch_of(chunk, place, box);
  to.quantized = std::make_unique<Destination::Quantized>(
      Destination::Quantized{std::move(scales), 0, place.data_offset, dequantizer_of(place, box, scale_box, memory)});
  phase.destinations.push_back(std::move(to));
}

std::optional<format::StoredCrc> LoadPhases::stretch_of(const format::Chunk& chunk, const TensorPlace& place,
                                                        const tensor::Box& box) const {
  const bool is_followed = follows_parts_ || (place.fills_stretch && box.sizes == chunk.box.sizes);
  return is_followed ? place.stretch : std::nullopt;
}

void LoadPhases::add_scales(const TensorPlace& place, const tensor::Box& scale_box,
                            const std::shared_ptr<Scales>& scales) {
  const Dequantization& how = *place.codes->how;
  LoadPhase& phase = phases_[scales_phase_];
  phase.scale_bytes += scales->bytes;
  tensor::Dims strides_bytes = tensor::row_major_strides(scale_box.sizes);
  for (int64_t& stride : strides_bytes) stride *= tensor::find_dtype(how.scale_dtype)->itemsize_bytes;
  for (size_t s = 0; s < how.scale_chunks.size(); ++s) {
    const format::Chunk& stored = how.scale_chunks[s];
    tensor::Box common;
    if (!tensor::intersect(stored.box, scale_box, &common)) continue;
    auto quantized = std::make_unique<Destination::Quantized>();
    quantized->scales = scales;
    for (size_t d = 0; d < common.num_dims(); ++d) {
      quantized->scales_offset += (common.offsets[d] - scale_box.offsets[d]) * strides_bytes[d];
      common.offsets[d] -= stored.box.offsets[d];
    }
    Destination to;
    to.quantized = std::move(quantized);
    add_to(&phase, stored, (*place.codes->scales)[s], common, strides_bytes, std::move(to));
  }
}

void LoadPhases::add_bytes(const format::Record& record, int64_t begin, int64_t end, uint8_t* memory) {
  first().wanted.push_back({record.file, record.offset + begin, {end - begin}, {1}, 1});
  first().destinations.push_back({tensor::BoxRuns::of_strides(first().wanted.back().sizes, {1}, 1, {1}), memory});
}

bool LoadPhases::begin_next() {
  const bool is_last = phases_.size() == 1;
  if (is_last) {
    clear();
  } else {
    phases_.pop_front();
    scales_phase_ = scales_phase_ > 0 ? scales_phase_ - 1 : 0;
  }
  return !is_last;
}

void LoadPhases::clear() {
  phases_.clear();
  phases_.emplace_back();
  scales_phase_ = 0;
}

}  // namespace bytecheckpoint::engine
