// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/segment_source.h"
#include "csrc/format/manifest.h"
#include "csrc/io/patience.h"
#include "csrc/io/reader.h"
#include "csrc/planner/load_plan.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::engine {

struct ReadingOptions {
  std::string directory;
  bool direct_io = true;
  int num_io_threads = 1;
  double io_timeout_s = 0;  // of silence, after which the storage is given up; 0: never
};

/// Segments of a checkpoint on their way into the slots of a ring: all that the threads of a Reader use, so that it can
/// be left behind with them. They write into slots, and never into anybody else's memory.
///
/// The destructor waits for reads in flight: owners let `ReadingHolder` delete it.
class Reading {
 public:
  /// \param manifest   Of the checkpoint in `options.directory`.
  /// \param segments   Ascending by file; their tags are their places here.
  /// \param num_slots  Of the ring's, from the first, to read into.
  Reading(ReadingOptions options, std::shared_ptr<const format::Manifest> manifest, staging::BorrowedRing ring,
          std::vector<planner::ReadSegment> segments, int num_slots);

  io::Reader& reader() { return reader_; }
  uint8_t* slot(int index) const { return ring_->slot(index); }
  int num_slots() const { return ring_->num_slots(); }
  const std::vector<planner::ReadSegment>& segments() const { return segments_; }
  /// What must be known of a file, which may have to be looked at first.
  base::Result<std::shared_ptr<const SourceFile>> file(uint32_t number);

 private:
  const ReadingOptions options_;
  const std::shared_ptr<const format::Manifest> manifest_;
  const staging::BorrowedRing ring_;
  const std::vector<planner::ReadSegment> segments_;
  SourceFiles files_;
  SegmentSource source_;
  // Declared after what their threads use.
  io::Patience patience_;
  io::Reader reader_;
};

using ReadingHolder = std::unique_ptr<Reading, io::DeletePatiently>;

}  // namespace bytecheckpoint::engine
