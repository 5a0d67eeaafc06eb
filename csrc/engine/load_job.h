// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/names.h"
#include "csrc/engine/source_file.h"
#include "csrc/engine/tensor_place.h"
#include "csrc/format/manifest.h"
#include "csrc/planner/load_plan.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::engine {

struct LoadOptions {
  std::string directory;
  Scope scope;  // whose commit mark the manifest is from
  bool direct_io = true;
  bool verify = true;  // CRCs of everything read; trailers are always compared with the manifest
  int num_io_threads = 1;
  int64_t ring_bytes = 64 << 20;
  /// Told after each segment how many of the bytes that a run wants have arrived; in the calling thread.
  std::function<void(int64_t)> progress;
};

struct LoadStats {
  int64_t num_boxes = 0;
  int64_t num_files = 0;
  int64_t bytes_wanted = 0;
  int64_t bytes_read = 0;  // whole blocks
  double seconds = 0;
};

/// One rank's part of a load: boxes of stored chunks into strided memory.
///
///     add_* -> run: plan (boxes to block ranges) -> read into slots -> verify block CRCs -> scatter into memory
///
/// Reading runs ahead in its own threads; verifying and scattering happen in the caller's. Nothing is scattered from a
/// block that failed its check. Foreign files have no blocks: there an element is scattered first, and the archive's
/// own checksum, where it has one, decides afterwards whether the load has failed. Not thread-safe.
class LoadJob {
 public:
  /// \param manifest  Of the checkpoint in `options.directory`; outlives the job.
  LoadJob(LoadOptions options, const format::Manifest& manifest);

  /// \param place   Of the chunk, from `locate_tensors`.
  /// \param box     Part of the chunk's own box, offsets counted from the chunk's first element.
  /// \param memory  As large as `box`, of the stored dtype.
  base::Status add_tensor(const std::string& fqn, const format::Chunk& chunk, const TensorPlace& place,
                          const tensor::Box& box, const tensor::StridedView& memory);
  /// The whole record; `memory` has record.bytes bytes.
  void add_bytes(const format::Record& record, uint8_t* memory);

  /// Fills all that was added since the last run.
  /// \param cancelled  Asked between segments, in the calling thread; true ends the load with kCancelled.
  /// \returns kCorrupt, kStorage; kChanged if a newer commit replaced the checkpoint meanwhile.
  base::Result<LoadStats> run(const std::function<bool()>& cancelled);

  /// Was it a newer commit that made `failure`? kChanged if so, else what it was.
  base::Status explain(base::Status failure) const;

 private:
  struct Destination {
    tensor::BoxRuns runs;
    uint8_t* memory;
    std::optional<uint32_t> data_crc;  // of the archive, if all of it is wanted
  };
  /// Part of the data of one destination, summed as it went by.
  struct Summed {
    uint32_t destination;
    int64_t begin, end;  // bytes of the chunk
    uint32_t crc;
  };
  class Source;

  base::Status execute(const planner::LoadPlan& plan, const std::function<bool()>& cancelled);
  base::Status deliver(const uint8_t* slot, const planner::ReadSegment& segment, const SourceFile& file);
  base::Status check_archives();

  const LoadOptions options_;
  const format::Manifest& manifest_;
  std::vector<planner::WantedBox> wanted_;
  std::vector<Destination> destinations_;
  std::vector<Summed> summed_;
};

}  // namespace bytecheckpoint::engine
