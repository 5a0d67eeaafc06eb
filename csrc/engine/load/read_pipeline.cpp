// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/read_pipeline.h"

#include <utility>

#include "csrc/io/directory.h"
#include "csrc/io/object_store.h"

namespace bytecheckpoint::engine {

ReadPipeline::ReadPipeline(ReadPipelineOptions options, std::shared_ptr<const format::Manifest> manifest,
                           std::shared_ptr<staging::SlotRing> ring, std::vector<planner::ReadSegment> segments,
                           int num_slots)
    : options_(std::move(options)),
      manifest_(std::move(manifest)),
      lane_(base::lane_of(options_.trace, "scatter")),
      ring_(std::move(ring)),
      segments_(std::move(segments)),
      files_(options_.directory, *manifest_),
      source_(&files_, options_.direct_io, segments_),
      deadline_(options_.io_timeout_s),
      reader_(
          segments_.empty() ? 0 : options_.num_io_threads, num_slots, [this] { return source_.next(); },
          [this](int slot) { return ring_->slot(slot); }, options_.io_timeout_s, options_.directory,
          /*doubles_slow_reads=*/io::is_url(options_.directory), options_.trace) {}

std::optional<io::FilledSlot> ReadPipeline::next() {
  const base::SpanTimer timer(lane_, base::Phase::kWaitRead);
  return reader_.next();
}

base::Result<std::shared_ptr<const SourceFile>> ReadPipeline::file(uint32_t number) {
  auto known = files_.find(number);
  if (known != nullptr) return known;
  const std::string path = io::join(options_.directory, manifest_->files[number].name);
  return deadline_.run("open", path, [this, number] { return files_.get(number); });
}

}  // namespace bytecheckpoint::engine
