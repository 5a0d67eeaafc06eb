// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/destinations.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "csrc/base/crc32.h"
#include "csrc/engine/load/dequantization.h"
#include "csrc/format/torch/builtin_archive.h"
#include "csrc/io/directory.h"
#include "csrc/staging/merge.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

/// Returns the dims in the order in which they are stored, outermost first; nothing if they are in that order.
std::vector<size_t> stored_order(const tensor::Dims& strides) {
  if (std::is_sorted(strides.begin(), strides.end(), std::greater<>())) return {};
  std::vector<size_t> order(strides.size());
  std::iota(order.begin(), order.end(), size_t{0});
  // Dims of one element may have any stride; wherever they stand, they change nothing.
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return strides[a] > strides[b]; });
  return order;
}

tensor::Dims ordered(const tensor::Dims& dims, const std::vector<size_t>& order) {
  if (order.empty()) return dims;
  tensor::Dims out(order.size());
  for (size_t d = 0; d < order.size(); ++d) out[d] = dims[order[d]];
  return out;
}

/// Whether a segment may end inside an element, because other writers' archives may begin anywhere. Then the bytes of
/// an element are treated as one more dim.
bool cuts_elements(const TensorPlace& place) {
  return place.data_offset % tensor::find_dtype(place.dtype)->itemsize_bytes != 0;
}

/// With so many pieces of a slot, or so long ones, a kernel of a device is no slower than its link.
constexpr int64_t kFewRuns = 4096;
constexpr int64_t kLongRunBytes = 256;

/// Whether nothing lies between the runs of a box in the file.
bool lies_together(const tensor::BoxRuns& runs) {
  return runs.num_runs() * runs.run_bytes() == runs.end() - runs.begin();
}

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

}  // namespace

planner::WantedBox wanted_of(const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box) {
  if (place.codes != nullptr) return wanted_codes_of(chunk, place, box);
  const int64_t itemsize = tensor::find_dtype(place.dtype)->itemsize_bytes;
  const std::vector<size_t> order = stored_order(place.strides);
  planner::WantedBox wanted{chunk.record.file, place.data_offset, ordered(box.sizes, order),
                            ordered(place.strides, order), itemsize};
  if (!tensor::has_elements(box)) return wanted;  // strides mean nothing
  for (int64_t& stride : wanted.strides_bytes) stride *= itemsize;
  for (size_t d = 0; d < box.num_dims(); ++d) wanted.offset += box.offsets[d] * place.strides[d] * itemsize;
  if (cuts_elements(place)) {
    wanted.sizes.push_back(itemsize);
    wanted.strides_bytes.push_back(1);
    wanted.itemsize_bytes = 1;
  }
  return wanted;
}

planner::WantedBox wanted_of(const format::Record& record) {
  return {record.file, record.offset, {record.bytes}, {1}, 1};
}

Destinations::Destinations(std::string directory, const format::Manifest& manifest, bool verify)
    : directory_(std::move(directory)), manifest_(manifest), verify_(verify) {}

Status Destinations::add_tensor(const std::string& fqn, const format::Chunk& chunk, const TensorPlace& place,
                                const tensor::Box& box, const tensor::StridedView& memory, int device) {
  const auto refuse = [&](const std::string& why) {
    return Status::make(Code::kInvalidArgument, text("while loading '", fqn, "': ", why), directory_);
  };
  if (!tensor::is_inside(box, chunk.box.sizes)) {
    return refuse(text("box at ", tensor::to_text(box.offsets), " of ", tensor::to_text(box.sizes),
                       " is not inside the stored chunk of shape ", tensor::to_text(chunk.box.sizes)));
  }
  if (memory.sizes != box.sizes || memory.dtype != place.dtype) {
    return refuse(text("wanted ", tensor::to_text(box.sizes), ", got memory of ", tensor::to_text(memory.sizes)));
  }
  if (device != staging::kHost) return add_on_device(fqn, chunk, place, box, memory, device);
  if (place.codes != nullptr) {
    add_quantized(chunk, place, box, memory);
  } else {
    add_plain(&phases_.front(), chunk, place, box, memory.strides_bytes, {{}, memory.data});
  }
  return Status::ok();
}

bool Destinations::suits_devices(const TensorPlace& place, const tensor::BoxRuns& runs) {
  if (place.codes != nullptr || cuts_elements(place)) return false;
  return lies_together(runs) || runs.run_bytes() >= kLongRunBytes || runs.num_runs() <= kFewRuns;
}

Status Destinations::add_on_device(const std::string& fqn, const format::Chunk& chunk, const TensorPlace& place,
                                   const tensor::Box& box, const tensor::StridedView& memory, int device) {
  Phase& phase = phases_.front();
  const planner::WantedBox wanted = wanted_of(chunk, place, box);
  const tensor::Dims strides_bytes = ordered(memory.strides_bytes, stored_order(place.strides));
  Destination to;
  to.runs = tensor::BoxRuns::of_strides(wanted.sizes, wanted.strides_bytes, wanted.itemsize_bytes, strides_bytes);
  if (!suits_devices(place, to.runs)) {
    return Status::make(Code::kUnsupported, text("while loading '", fqn, "': not in few pieces of a device"));
  }
  if (box.sizes == chunk.box.sizes) to.data_crc = place.data_crc;
  to.on_device = std::make_unique<OnDevice>(OnDevice{device, {memory.data, memory.dtype, wanted.sizes, strides_bytes}});
  phase.wanted.push_back(wanted);
  phase.destinations.push_back(std::move(to));
  return Status::ok();
}

int Destinations::any_device() const {
  for (const Destination& to : phases_.front().destinations) {
    if (to.on_device != nullptr) return to.on_device->device;
  }
  return staging::kHost;
}

Status Destinations::add_to_copies(const Destination& destination, const uint8_t* window, int64_t begin, int64_t end) {
  const auto& [device, view] = *destination.on_device;
  const tensor::BoxRuns& runs = destination.runs;
  // Copies to a device only read the host's memory.
  auto* const host = const_cast<uint8_t*>(window);
  end = std::min(end, runs.end());
  if (lies_together(runs)) return copies_->add(device, view, begin, end, host);
  for (int64_t run = runs.first_run_ending_after(begin); run < runs.num_runs(); ++run) {
    const int64_t at = runs.chunk_offset(run);
    const int64_t from = std::max(begin, at), to = std::min(end, at + runs.run_bytes());
    if (from >= to) break;
    const tensor::StridedView row{view.data + runs.memory_offset(run),
                                  view.dtype,
                                  {runs.run_bytes() / runs.itemsize_bytes()},
                                  {runs.memory_step_bytes()}};
    BCP_RETURN_IF_ERROR(copies_->add(device, row, from - at, to - at, host + (from - begin)));
  }
  return Status::ok();
}

void Destinations::add_plain(Phase* phase, const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box,
                             const tensor::Dims& memory_strides_bytes, Destination to) {
  phase->wanted.push_back(wanted_of(chunk, place, box));
  tensor::Dims strides_bytes = ordered(memory_strides_bytes, stored_order(place.strides));
  if (cuts_elements(place) && tensor::has_elements(box)) strides_bytes.push_back(1);
  const planner::WantedBox& wanted = phase->wanted.back();
  to.runs = tensor::BoxRuns::of_strides(wanted.sizes, wanted.strides_bytes, wanted.itemsize_bytes, strides_bytes);
  if (box.sizes == chunk.box.sizes) to.data_crc = place.data_crc;
  phase->destinations.push_back(std::move(to));
}

void Destinations::add_quantized(const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box,
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
  Phase& phase = phases_[scales_phase_ + 1];
  phase.wanted.push_back(wanted_of(chunk, place, box));
  const planner::WantedBox& wanted = phase.wanted.back();
  Destination to;
  to.runs = tensor::BoxRuns::of_strides(wanted.sizes, wanted.strides_bytes, 1, wanted.strides_bytes);
  if (box.sizes == chunk.box.sizes) to.data_crc = place.data_crc;
  to.quantized = std::make_unique<Quantized>(
      Quantized{std::move(scales), 0, place.data_offset, dequantizer_of(place, box, scale_box, memory)});
  phase.destinations.push_back(std::move(to));
}

void Destinations::add_scales(const TensorPlace& place, const tensor::Box& scale_box,
                              const std::shared_ptr<Scales>& scales) {
  const Dequantization& how = *place.codes->how;
  Phase& phase = phases_[scales_phase_];
  phase.scale_bytes += scales->bytes;
  tensor::Dims strides_bytes = tensor::row_major_strides(scale_box.sizes);
  for (int64_t& stride : strides_bytes) stride *= tensor::find_dtype(how.scale_dtype)->itemsize_bytes;
  for (size_t s = 0; s < how.scale_chunks.size(); ++s) {
    const format::Chunk& stored = how.scale_chunks[s];
    tensor::Box common;
    if (!tensor::intersect(stored.box, scale_box, &common)) continue;
    auto quantized = std::make_unique<Quantized>();
    quantized->scales = scales;
    for (size_t d = 0; d < common.num_dims(); ++d) {
      quantized->scales_offset += (common.offsets[d] - scale_box.offsets[d]) * strides_bytes[d];
      common.offsets[d] -= stored.box.offsets[d];
    }
    Destination to;
    to.quantized = std::move(quantized);
    add_plain(&phase, stored, (*place.codes->scales)[s], common, strides_bytes, std::move(to));
  }
}

void Destinations::add_bytes(const format::Record& record, int64_t begin, int64_t end, uint8_t* memory) {
  if (record.kind == format::RecordKind::kInline) {
    const std::string archive = format::archive_of_pickle(manifest_.foreign->text_of(record));
    std::memcpy(memory, archive.data() + begin, static_cast<size_t>(end - begin));
    return;
  }
  Phase& phase = phases_.front();
  phase.wanted.push_back({record.file, record.offset + begin, {end - begin}, {1}, 1});
  phase.destinations.push_back({tensor::BoxRuns::of_strides(phase.wanted.back().sizes, {1}, 1, {1}), memory});
}

bool Destinations::is_plain() const {
  const std::vector<Destination>& all = phases_.front().destinations;
  return std::none_of(all.begin(), all.end(), [](const Destination& to) {
    return to.quantized != nullptr || to.on_device != nullptr || to.data_crc.has_value();
  });
}

Status Destinations::check(const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes,
                           const SourceFile& file) const {
  if (!verify_ || !file.has_checksums) return Status::ok();
  return file.check_blocks(slot, segment.offset, bytes);
}

Status Destinations::scatter(const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes,
                             const SourceFile& file) {
  bool any_device = false;
  Status outcome = scatter_all(slot, segment, bytes, file, &any_device);
  if (!any_device) return outcome;
  if (outcome.is_ok()) return copies_->scatter();
  copies_->clear();  // the slot will have other bytes
  return outcome;
}

Status Destinations::scatter_all(const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes,
                                 const SourceFile& file, bool* any_device) {
  const int64_t end = segment.offset + bytes;
  Phase& phase = phases_.front();
  for (const uint32_t index : segment.wanted) {
    // The window counts bytes of the chunk, which may begin behind the segment's start or end before its end.
    const int64_t data_offset = phase.wanted[index].offset;
    const Destination& destination = phase.destinations[index];
    if (data_offset + destination.runs.end() > file.end_of_records) return file.behind_the_records(data_offset);
    const int64_t from = std::max(segment.offset, data_offset);
    if (from >= end) continue;
    const uint8_t* window = slot + (from - segment.offset);
    Quantized* quantized = destination.quantized.get();
    if (destination.on_device != nullptr) {
      *any_device = true;
      BCP_RETURN_IF_ERROR(add_to_copies(destination, window, from - data_offset, end - data_offset));
    } else if (quantized != nullptr && quantized->dequantizer.has_value()) {
      const int64_t record = quantized->record_offset;
      quantized->dequantizer->scatter(window, from - record, end - record, quantized->scales->data(), &tables_);
    } else {
      uint8_t* memory =
          quantized == nullptr ? destination.memory : quantized->scales->data() + quantized->scales_offset;
      staging::scatter_window(destination.runs, window, from - data_offset, end - data_offset, memory);
    }
    if (verify_ && destination.data_crc.has_value()) {
      const int64_t to = std::min(end, data_offset + destination.runs.end());
      summed_.push_back(
          {index, from - data_offset, to - data_offset, base::crc32(0, window, static_cast<size_t>(to - from))});
    }
  }
  return Status::ok();
}

Status Destinations::check_archives() {
  std::sort(summed_.begin(), summed_.end(), [](const Summed& a, const Summed& b) {
    return a.destination != b.destination ? a.destination < b.destination : a.begin < b.begin;
  });
  const Phase& phase = phases_.front();
  for (size_t i = 0; i < summed_.size();) {
    const uint32_t index = summed_[i].destination;
    uint32_t crc = 0;
    for (; i < summed_.size() && summed_[i].destination == index; ++i) {
      crc = base::crc32_combine(crc, summed_[i].crc, static_cast<uint64_t>(summed_[i].end - summed_[i].begin));
    }
    if (crc == *phase.destinations[index].data_crc) continue;
    const std::string path = io::join(directory_, manifest_.files[phase.wanted[index].file].name);
    return Status::make(
        Code::kCorrupt,
        text("read(", path, ", offset=", phase.wanted[index].offset, ", ", phase.destinations[index].runs.end(),
             " bytes): the data have CRC ", crc, ", but the archive says ", *phase.destinations[index].data_crc,
             "; if it was written with torch.serialization.set_crc32_options(False), load with "
             "Config(verify=False)"),
        path);
  }
  return Status::ok();
}

bool Destinations::begin_next_phase() {
  summed_.clear();
  const bool is_last = phases_.size() == 1;
  if (is_last) {
    clear();
  } else {
    phases_.pop_front();
    scales_phase_ = scales_phase_ > 0 ? scales_phase_ - 1 : 0;
  }
  return !is_last;
}

void Destinations::clear() {
  phases_.clear();
  phases_.emplace_back();
  scales_phase_ = 0;
  summed_.clear();
  if (copies_ != nullptr) copies_->clear();
}

}  // namespace bytecheckpoint::engine
