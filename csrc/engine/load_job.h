// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/destinations.h"
#include "csrc/engine/names.h"
#include "csrc/engine/reading.h"
#include "csrc/format/manifest.h"
#include "csrc/planner/load_plan.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::engine {

struct LoadOptions {
  std::string directory;
  Scope scope;  // whose commit mark the manifest is from
  bool direct_io = true;
  bool verify = true;  // CRCs of everything read; trailers are always compared with the manifest
  int num_io_threads = 1;
  int64_t ring_bytes = staging::kDefaultRingBytes;
  /// Told after each segment how many of the bytes that a run wants have arrived; in the calling thread.
  std::function<void(int64_t)> progress;
  double io_timeout_s = 0;  // of silence, after which the storage is given up; 0: never

  ReadingOptions reading() const { return {directory, direct_io, num_io_threads, io_timeout_s}; }
};

struct LoadStats {
  int64_t num_boxes = 0;
  int64_t num_files = 0;
  int64_t bytes_wanted = 0;
  int64_t bytes_read = 0;      // whole blocks
  int64_t bytes_received = 0;  // of other ranks
  double seconds = 0;
};

/// One rank's part of a load: boxes of stored chunks into strided memory.
///
///     destinations().add_* -> run: plan (boxes to block ranges) -> read into slots -> verify block CRCs -> scatter
///
/// Reading runs ahead in its own threads; verifying and scattering happen in the caller's. Nothing is scattered from a
/// block that failed its check. Foreign files have no blocks: there an element is scattered first, and the archive's
/// own checksum, where it has one, decides afterwards whether the load has failed. Not thread-safe.
///
/// `SharedRun` takes the place of `run` where several ranks read together.
class LoadJob {
 public:
  /// \param manifest  Of the checkpoint in `options.directory`. Threads that the storage does not answer keep it, too.
  LoadJob(LoadOptions options, std::shared_ptr<const format::Manifest> manifest);
  /// \param manifest  Outlives the job and its threads: for storage that answers.
  LoadJob(LoadOptions options, const format::Manifest& manifest);

  const LoadOptions& options() const { return options_; }
  const std::shared_ptr<const format::Manifest>& manifest() const { return manifest_; }
  Destinations& destinations() { return destinations_; }

  /// Fills all that was added since the last run.
  /// \param cancelled  Asked between segments, in the calling thread; true ends the load with kCancelled.
  /// \returns kCorrupt, kStorage; kChanged if a newer commit replaced the checkpoint meanwhile.
  base::Result<LoadStats> run(const std::function<bool()>& cancelled);

  /// Was it a newer commit that made `failure`? kChanged if so, else what it was.
  base::Status explain(base::Status failure) const;

 private:
  base::Status execute(planner::LoadPlan plan, const std::function<bool()>& cancelled);

  const LoadOptions options_;
  const std::shared_ptr<const format::Manifest> manifest_;
  Destinations destinations_;
};

}  // namespace bytecheckpoint::engine
