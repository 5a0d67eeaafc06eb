// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/base/trace.h"
#include "csrc/engine/load/segment_source.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/io/io_deadline.h"
#include "csrc/io/reader.h"
#include "csrc/planner/load_plan.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::engine {

/// Where and how a ReadPipeline reads.
struct ReadPipelineOptions {
  std::string directory;
  bool direct_io = true;
  int num_io_threads = 1;
  double io_timeout_s = 0;                       // a call fails if the storage has not answered for so long; 0: never
  std::shared_ptr<base::Trace> trace = nullptr;  // records the reads; null: nothing does
};

/// Reads segments of a checkpoint into the slots of a ring. It owns all that the threads of a `Reader` use, so that it
/// can outlive its owner if the storage does not answer. The threads write into slots only, never into the caller's
/// memory.
///
/// Thread-safe. The destructor waits for reads in flight: owners let `ReadPipelineHolder` delete it.
class ReadPipeline {
 public:
  /// \param manifest   Of the checkpoint in `options.directory`.
  /// \param segments   Ascending by file. The tag of a request is the position of its segment here.
  /// \param num_slots  How many of the ring's slots, from the first, to read into.
  /// \param ring       The pipeline holds it until no thread writes to it any more.
  ReadPipeline(ReadPipelineOptions options, std::shared_ptr<const format::Manifest> manifest,
               std::shared_ptr<staging::SlotRing> ring, std::vector<planner::ReadSegment> segments, int num_slots);

  /// Returns the next filled slot, as `Reader::next` does; the trace has how long that took.
  std::optional<io::FilledSlot> next();
  /// Returns filled slots. `FilledSlot::request.tag` is the position in `segments()`; `release` each slot when it is
  /// used.
  io::Reader& reader() { return reader_; }
  uint8_t* slot(int index) const { return ring_->slot(index); }
  int num_slots() const { return ring_->num_slots(); }
  const std::vector<planner::ReadSegment>& segments() const { return segments_; }
  /// Returns what must be known about a file before its bytes are used. May open the file first. \returns the errors of
  /// `SourceFile::open`.
  base::Result<std::shared_ptr<const SourceFile>> file(uint32_t number);

 private:
  const ReadPipelineOptions options_;
  const std::shared_ptr<const format::Manifest> manifest_;
  base::TraceLane* const lane_;  // of the owner's thread; null without a trace
  const std::shared_ptr<staging::SlotRing> ring_;
  const std::vector<planner::ReadSegment> segments_;
  SourceFiles files_;
  SegmentSource source_;
  // Declared after what their threads use, so that these are joined first.
  io::IoDeadline deadline_;
  io::Reader reader_;
};

using ReadPipelineHolder = std::unique_ptr<ReadPipeline, io::DeleteInBackground>;

}  // namespace bytecheckpoint::engine
