// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load_job.h"

#include <cerrno>
#include <chrono>
#include <utility>

#include "csrc/engine/open_checkpoint.h"
#include "csrc/engine/segment_source.h"
#include "csrc/io/reader.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::engine {

using base::Code;
using base::Status;
using base::text;

LoadJob::LoadJob(LoadOptions options, const format::Manifest& manifest)
    : options_(std::move(options)), manifest_(manifest), destinations_(options_.directory, manifest, options_.verify) {}

base::Result<LoadStats> LoadJob::run(const std::function<bool()>& cancelled) {
  struct Forget {  // however it ends
    Destinations* destinations;
    ~Forget() { destinations->clear(); }
  } const forget{&destinations_};
  const auto begin = std::chrono::steady_clock::now();
  BCP_ASSIGN_OR_RETURN(const planner::LoadPlan plan,
                       planner::plan_load(destinations_.wanted(), format::kBlockBytes, staging::kSlotBytes));
  Status outcome = execute(plan, cancelled);
  if (outcome.is_ok()) outcome = destinations_.check_archives();
  if (!outcome.is_ok()) return explain(std::move(outcome));
  LoadStats stats;
  stats.num_boxes = static_cast<int64_t>(destinations_.wanted().size());
  stats.num_files = plan.num_files();
  stats.bytes_wanted = plan.bytes_wanted;
  stats.bytes_read = plan.bytes_read;
  stats.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return stats;
}

Status LoadJob::execute(const planner::LoadPlan& plan, const std::function<bool()>& cancelled) {
  BCP_ASSIGN_OR_RETURN(const staging::BorrowedRing ring, staging::BorrowedRing::borrow(options_.ring_bytes));
  std::vector<const planner::ReadSegment*> segments;
  for (const planner::ReadSegment& segment : plan.segments) segments.push_back(&segment);
  SourceFiles files(options_.directory, manifest_);
  SegmentSource source(&files, options_.direct_io, std::move(segments));
  io::Reader reader(
      options_.num_io_threads, ring->num_slots(), [&] { return source.next(); },
      [&](int slot) { return ring->slot(slot); });
  int64_t bytes_read = 0;
  while (const auto filled = reader.next()) {
    BCP_RETURN_IF_ERROR(filled->status);
    if (cancelled()) return Status::make(Code::kCancelled, text("load(", options_.directory, "): interrupted"));
    const planner::ReadSegment& segment = plan.segments[filled->request.tag];
    const int64_t bytes = filled->request.wanted;
    const uint8_t* slot = ring->slot(filled->slot);
    BCP_ASSIGN_OR_RETURN(const auto file, files.get(segment.file));
    BCP_RETURN_IF_ERROR(destinations_.check(slot, segment, bytes, *file));
    BCP_RETURN_IF_ERROR(destinations_.scatter(slot, segment, bytes, *file));
    reader.release(filled->slot);
    if (!options_.progress) continue;
    bytes_read += segment.bytes;
    // In proportion: what a segment delivers is not counted one by one.
    const double share = static_cast<double>(bytes_read) / static_cast<double>(plan.bytes_read);
    options_.progress(static_cast<int64_t>(static_cast<double>(plan.bytes_wanted) * share));
  }
  return Status::ok();
}

Status LoadJob::explain(Status failure) const {
  if (failure.code() != Code::kCorrupt && failure.sys_errno() != ENOENT) return failure;
  const auto current = open_checkpoint(options_.directory, {options_.scope});
  if (!current.is_ok() || current.value().save_id == manifest_.save_id) {
    // Still the same checkpoint: then a file that is gone is damage.
    if (failure.sys_errno() != ENOENT) return failure;
    return Status::make(Code::kCorrupt, text("a data file of the checkpoint is missing: ", failure.message()),
                        failure.path(), ENOENT);
  }
  return Status::make(Code::kChanged,
                      text("load(", options_.directory,
                           "): a newer commit replaced the checkpoint "
                           "while it was read (",
                           failure.message(), ")"),
                      options_.directory);
}

}  // namespace bytecheckpoint::engine
