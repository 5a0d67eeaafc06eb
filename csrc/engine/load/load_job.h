// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/base/trace.h"
#include "csrc/engine/load/destinations.h"
#include "csrc/engine/load/memory_load.h"
#include "csrc/engine/load/read_pipeline.h"
#include "csrc/engine/names.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/planner/load_plan.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::engine {

/// How one rank reads a checkpoint.
struct LoadOptions {
  std::string directory;
  Scope scope;  // the commit mark that the manifest was read from
  bool direct_io = true;
  bool verify = true;  // compare CRCs of all that is read; trailers are compared in any case
  int num_io_threads = 1;
  int64_t ring_bytes = staging::kDefaultRingBytes;  // not used from a file system in memory
  /// Called in the calling thread after segments, with an estimate of how many of the wanted bytes have arrived. Must
  /// not throw.
  std::function<void(int64_t)> progress;
  double io_timeout_s = 0;          // a call fails if the storage has not answered for so long; 0: never
  double visibility_timeout_s = 0;  // how long to wait for a missing file to be seen, where files may be seen late
  std::shared_ptr<base::Trace> trace = nullptr;  // records what the threads do; null: nothing does
  int64_t segment_bytes = staging::kSlotBytes;   // most that one request reads of a file, whole blocks

  ReadPipelineOptions reading() const { return {directory, direct_io, num_io_threads, io_timeout_s, trace}; }
};

/// What one run has read.
struct LoadStats {
  int64_t num_boxes = 0;
  int64_t num_files = 0;
  int64_t bytes_wanted = 0;
  int64_t bytes_read = 0;      // whole blocks, so mostly more than is wanted
  int64_t bytes_received = 0;  // from other ranks, in a shared run
  double seconds = 0;
};

/// Reads boxes of stored chunks into strided memory: one rank's part of a load.
///
///     destinations().add_* -> run: plan (boxes to block ranges) -> read into slots -> verify block CRCs -> scatter
///
/// The reader's threads read ahead into slots; the calling thread verifies and scatters (not from a file system in
/// memory, where there is nothing to wait for: see `MemoryLoad`). The unit of reading is a block, since a CRC covers
/// one. Each block that holds a wanted byte is read once, no other is read, and neighbours are joined to segments of up
/// to a slot:
///
///     file    |block 0 |block 1 |block 2 |block 3 |block 4 |block 5 |
///     wanted             aa  aa  bbbb                 cc                 boxes a, b, c: runs of elements
///     read             |    segment 0    |        | seg. 1 |             each into one slot
///
/// Nothing is copied from a block whose CRC is wrong; one of a file in memory may be read to where it goes, and is
/// checked there. Files of other writers have no blocks: their elements are copied first, and the checksum of an
/// archive, if it has one, is compared at the end of the run.
///
/// `SharedRun` takes the place of `run` where several ranks read together. Not thread-safe.
class LoadJob {
 public:
  /// \param manifest  Of the checkpoint in `options.directory`. The job shares it with threads that may wait for
  /// storage longer than the job lives.
  LoadJob(LoadOptions options, std::shared_ptr<const format::Manifest> manifest);
  /// \param manifest  Must outlive the job and its threads, so this is for storage that answers.
  LoadJob(LoadOptions options, const format::Manifest& manifest);

  const LoadOptions& options() const { return options_; }
  const std::shared_ptr<const format::Manifest>& manifest() const { return manifest_; }
  /// What the next run fills.
  Destinations& destinations() { return destinations_; }

  /// Fills all destinations that were added since the last run, and forgets them, also if it fails. Blocks for I/O.
  /// \param cancelled  Asked after segments, in the calling thread; true ends the load with kCancelled. Must not throw.
  /// \returns kCorrupt for a damaged or missing file. kChanged if a newer commit replaced the checkpoint meanwhile,
  /// kNotFound if it was removed. kStorage. kCancelled. After a failure the destinations may be filled in part.
  base::Result<LoadStats> run(const std::function<bool()>& cancelled);

  /// Finds out whether a newer commit caused `failure`: reads the commit mark again if a file is missing or damaged.
  /// Of another writer's checkpoint it looks at all files again, which have no ids.
  /// \returns kChanged if the mark names another save, a file has changed, or one that was missing is seen by now.
  /// kNotFound if the mark is gone. kCorrupt for a missing file if it names the same save. Else `failure`.
  base::Status explain(base::Status failure) const;
  /// Looks again at the files of another writer that were read, which it may have written in place meanwhile; of ours,
  /// the checksums tell. Objects of a store are always read in the version that was noted.
  /// \param segments  What was read. \returns kChanged. kStorage.
  base::Status check_unchanged_files(const std::vector<planner::ReadSegment>& segments) const;

 private:
  /// Looks again for a file of the checkpoint. \returns what `check_files` says.
  base::Status look_for(const std::string& path) const;
  /// Plans and reads the first phase. \param max_gap_bytes  See `plan_load`.
  base::Status read(int64_t max_gap_bytes, const std::function<bool()>& cancelled, LoadStats* stats);
  /// \param bytes_before  What was wanted in the phases before.
  base::Status execute(planner::LoadPlan plan, int64_t bytes_before, const std::function<bool()>& cancelled);
  /// Reads through a ring of slots. \param after_segment  As in MemoryLoad.
  base::Status read_ahead(std::vector<planner::ReadSegment> segments, const MemoryLoad::AfterSegment& after_segment);

  const LoadOptions options_;
  const std::shared_ptr<const format::Manifest> manifest_;
  Destinations destinations_;
};

}  // namespace bytecheckpoint::engine
