// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/destinations.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "csrc/base/crc32.h"
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

}  // namespace

planner::WantedBox wanted_of(const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box) {
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
                                const tensor::Box& box, const tensor::StridedView& memory) {
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
  wanted_.push_back(wanted_of(chunk, place, box));
  tensor::Dims strides_bytes = ordered(memory.strides_bytes, stored_order(place.strides));
  if (cuts_elements(place) && tensor::has_elements(box)) strides_bytes.push_back(1);
  const planner::WantedBox& wanted = wanted_.back();
  destinations_.push_back(
      {tensor::BoxRuns::of_strides(wanted.sizes, wanted.strides_bytes, wanted.itemsize_bytes, strides_bytes),
       memory.data, box.sizes == chunk.box.sizes ? place.data_crc : std::nullopt});
  return Status::ok();
}

void Destinations::add_bytes(const format::Record& record, uint8_t* memory) {
  wanted_.push_back(wanted_of(record));
  const planner::WantedBox& wanted = wanted_.back();
  destinations_.push_back({tensor::BoxRuns::of_strides(wanted.sizes, {1}, 1, {1}), memory, std::nullopt});
}

Status Destinations::check(const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes,
                           const SourceFile& file) const {
  if (!verify_ || !file.has_checksums) return Status::ok();
  return file.check_blocks(slot, segment.offset, bytes);
}

Status Destinations::scatter(const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes,
                             const SourceFile& file) {
  const int64_t end = segment.offset + bytes;
  for (const uint32_t index : segment.wanted) {
    // The window counts bytes of the chunk, which may begin behind the segment's start or end before its end.
    const int64_t data_offset = wanted_[index].offset;
    const Destination& destination = destinations_[index];
    if (data_offset + destination.runs.end() > file.end_of_records) return file.behind_the_records(data_offset);
    const int64_t from = std::max(segment.offset, data_offset);
    if (from >= end) continue;
    staging::scatter_window(destination.runs, slot + (from - segment.offset), from - data_offset, end - data_offset,
                            destination.memory);
    if (verify_ && destination.data_crc.has_value()) {
      const int64_t to = std::min(end, data_offset + destination.runs.end());
      summed_.push_back({index, from - data_offset, to - data_offset,
                         base::crc32(0, slot + (from - segment.offset), static_cast<size_t>(to - from))});
    }
  }
  return Status::ok();
}

Status Destinations::check_archives() {
  std::sort(summed_.begin(), summed_.end(), [](const Summed& a, const Summed& b) {
    return a.destination != b.destination ? a.destination < b.destination : a.begin < b.begin;
  });
  for (size_t i = 0; i < summed_.size();) {
    const uint32_t index = summed_[i].destination;
    uint32_t crc = 0;
    for (; i < summed_.size() && summed_[i].destination == index; ++i) {
      crc = base::crc32_combine(crc, summed_[i].crc, static_cast<uint64_t>(summed_[i].end - summed_[i].begin));
    }
    if (crc == *destinations_[index].data_crc) continue;
    const std::string path = io::join(directory_, manifest_.files[wanted_[index].file].name);
    return Status::make(
        Code::kCorrupt,
        text("read(", path, ", offset=", wanted_[index].offset, ", ", destinations_[index].runs.end(),
             " bytes): the data have CRC ", crc, ", but the archive says ", *destinations_[index].data_crc,
             "; if it was written with torch.serialization.set_crc32_options(False), load with "
             "Config(verify=False)"),
        path);
  }
  return Status::ok();
}

void Destinations::clear() {
  wanted_.clear();
  destinations_.clear();
  summed_.clear();
}

}  // namespace bytecheckpoint::engine
