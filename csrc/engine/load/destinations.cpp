// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/destinations.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "csrc/format/torch/builtin_archive.h"

namespace bytecheckpoint::engine {

using base::Code;
using base::Status;
using base::text;

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
  if (device != staging::kHost) {
    if (phases_.add_on_device(chunk, place, box, memory, device)) return Status::ok();
    return Status::make(Code::kUnsupported, text("while loading '", fqn, "': not in few pieces of a device"));
  }
  if (place.codes != nullptr) {
    phases_.add_quantized(chunk, place, box, memory);
  } else {
    phases_.add_plain(chunk, place, box, memory);
  }
  return Status::ok();
}

void Destinations::add_bytes(const format::Record& record, int64_t begin, int64_t end, uint8_t* memory) {
  if (record.kind != format::RecordKind::kInline) return phases_.add_bytes(record, begin, end, memory);
  const std::string archive = format::archive_of_pickle(manifest_.foreign->text_of(record));
  std::memcpy(memory, archive.data() + begin, static_cast<size_t>(end - begin));
}

int Destinations::any_device() const {
  for (const Destination& to : phases_.first().destinations) {
    if (to.on_device != nullptr) return to.on_device->device;
  }
  return staging::kHost;
}

bool Destinations::is_plain() const {
  const std::vector<Destination>& all = phases_.first().destinations;
  return std::none_of(all.begin(), all.end(), [](const Destination& to) {
    return to.quantized != nullptr || to.on_device != nullptr || to.stretch.has_value();
  });
}

uint8_t* Destinations::memory_of(const planner::ReadSegment& segment, const SourceFile& file) const {
  if (segment.wanted.size() != 1) return nullptr;
  const auto [begin, end] = range_in_file(segment.wanted.front());
  if (segment.offset < begin || segment.offset + segment.bytes > end || end > file.end_of_records) return nullptr;
  const Destination& to = phases_.first().destinations[segment.wanted.front()];
  const tensor::BoxRuns& runs = to.runs;
  const bool is_one_run = runs.num_runs() == 1 && runs.memory_step_bytes() == runs.itemsize_bytes();
  const int64_t in_run = segment.offset - begin - runs.begin();
  return is_one_run && in_run >= 0 ? to.memory + runs.memory_offset(0) + in_run : nullptr;
}

Status Destinations::check(const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes,
                           const SourceFile& file) const {
  if (!verify_ || !file.has_checksums) return Status::ok();
  return file.check_blocks(slot, segment.offset, bytes);
}

Status Destinations::scatter(const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes,
                             const SourceFile& file) {
  return scatter_.run(&phases_.first(), slot, segment, bytes, file, verify_ ? &checksums() : nullptr);
}

Status Destinations::check_archives() {
  return checksums().check(manifest_, directory_);
}

bool Destinations::begin_next_phase() {
  own_.clear();
  if (phases_.begin_next()) return true;
  scatter_.clear();
  return false;
}

void Destinations::clear() {
  phases_.clear();
  own_.clear();
  scatter_.clear();
}

}  // namespace bytecheckpoint::engine
