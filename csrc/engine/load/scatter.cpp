// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/scatter.h"

#include <algorithm>

#include "csrc/staging/merge.h"

namespace bytecheckpoint::engine {

using base::Status;

Status Scatter::run(LoadPhase* phase, const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes,
                    const SourceFile& file, StoredChecksums* checksums) {
  bool any_device = false;
  Status outcome = copy_all(phase, slot, segment, bytes, file, checksums, &any_device);
  if (!any_device) return outcome;
  if (outcome.is_ok()) return copies_->scatter();
  copies_->clear();  // the slot will have other bytes
  return outcome;
}

Status Scatter::copy_all(LoadPhase* phase, const uint8_t* slot, const planner::ReadSegment& segment, int64_t bytes,
                         const SourceFile& file, StoredChecksums* checksums, bool* any_device) {
  const int64_t end = segment.offset + bytes;
  for (const uint32_t index : segment.wanted) {
    // The window counts bytes of the chunk, which may begin behind the segment's start or end before its end.
    const int64_t data_offset = phase->wanted[index].offset;
    const Destination& destination = phase->destinations[index];
    if (data_offset + destination.runs.end() > file.end_of_records) return file.behind_the_records(data_offset);
    const int64_t from = std::max(segment.offset, data_offset);
    if (from >= end) continue;
    const uint8_t* window = slot + (from - segment.offset);
    Destination::Quantized* quantized = destination.quantized.get();
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
    if (checksums != nullptr && destination.stretch.has_value()) {
      const int64_t to = std::min(end, data_offset + destination.runs.end());
      if (from < to) checksums->add(*destination.stretch, from, to, window);
    }
  }
  return Status::ok();
}

Status Scatter::add_to_copies(const Destination& destination, const uint8_t* window, int64_t begin, int64_t end) {
  const auto& [device, view] = *destination.on_device;
  const tensor::BoxRuns& runs = destination.runs;
  // Copies to a device only read the host's memory.
  auto* const host = const_cast<uint8_t*>(window);
  end = std::min(end, runs.end());
  if (runs.lie_together()) return copies_->add(device, view, begin, end, host);
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

void Scatter::clear() {
  if (copies_ != nullptr) copies_->clear();
}

}  // namespace bytecheckpoint::engine
