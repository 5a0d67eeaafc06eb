// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/load_job.h"

#include <cerrno>
#include <chrono>
#include <cmath>
#include <utility>

#include "csrc/engine/open/check_files.h"
#include "csrc/engine/open/open_any_checkpoint.h"
#include "csrc/engine/open/open_checkpoint.h"
#include "csrc/engine/open/planned_files.h"
#include "csrc/io/directory.h"
#include "csrc/io/file_system.h"
#include "csrc/io/io_deadline.h"
#include "csrc/io/late_changes.h"
#include "csrc/io/object_store.h"

namespace bytecheckpoint::engine {

using base::Code;
using base::Status;
using base::text;

namespace {

/// What a link of 50 MB/s moves within 20 ms, which one more request to an object store would take.
constexpr int64_t kStoreGapBytes = 1 << 20;

/// What is packed is read from front to back, by one thread: others would have it unpacked again.
LoadOptions in_order(LoadOptions options, const format::Manifest& manifest) {
  if (manifest.foreign.has_value() && manifest.foreign->is_packed) options.num_io_threads = 1;
  return options;
}

}  // namespace

LoadJob::LoadJob(LoadOptions options, std::shared_ptr<const format::Manifest> manifest)
    : options_(in_order(std::move(options), *manifest)),
      manifest_(std::move(manifest)),
      destinations_(options_.directory, *manifest_, options_.verify) {}

LoadJob::LoadJob(LoadOptions options, const format::Manifest& manifest)
    : LoadJob(std::move(options), std::shared_ptr<const format::Manifest>(std::shared_ptr<void>(), &manifest)) {}

base::Result<LoadStats> LoadJob::run(const std::function<bool()>& cancelled) {
  struct Forget {  // forgets the destinations, however the run ends
    Destinations* destinations;
    ~Forget() { destinations->clear(); }
  } const forget{&destinations_};
  const auto begin = std::chrono::steady_clock::now();
  const int64_t max_gap_bytes = io::is_url(options_.directory) ? kStoreGapBytes : 0;
  LoadStats stats;
  do {
    stats.num_boxes += static_cast<int64_t>(destinations_.wanted().size());
    const LoadStats before = stats;
    Status outcome = read(max_gap_bytes, cancelled, &stats);
    // What is damaged may be in a gap, where nobody wants it, or may have been damaged on its way.
    if (outcome.code() == Code::kCorrupt && max_gap_bytes > 0) {
      stats.num_files = before.num_files;
      stats.bytes_wanted = before.bytes_wanted;
      outcome = read(0, cancelled, &stats);
    }
    if (outcome.is_ok()) outcome = destinations_.check_archives();
    if (!outcome.is_ok()) return explain(std::move(outcome));
  } while (destinations_.begin_next_phase());
  stats.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return stats;
}

Status LoadJob::read(int64_t max_gap_bytes, const std::function<bool()>& cancelled, LoadStats* stats) {
  const int64_t segment_bytes = io::is_url(options_.directory) ? staging::kSlotBytes : options_.segment_bytes;
  planner::LoadPlan plan =
      planner::plan_load(destinations_.wanted(), format::kBlockBytes, segment_bytes, max_gap_bytes);
  const int64_t bytes_before = stats->bytes_wanted;
  stats->num_files += plan.num_files();
  stats->bytes_wanted += plan.bytes_wanted;
  stats->bytes_read += plan.bytes_read;
  return execute(std::move(plan), bytes_before, cancelled);
}

Status LoadJob::execute(planner::LoadPlan plan, int64_t bytes_before, const std::function<bool()>& cancelled) {
  const auto after_segment = [&, wanted = static_cast<double>(plan.bytes_wanted),
                              all = static_cast<double>(plan.bytes_read)](int64_t bytes_read) {
    if (cancelled()) return Status::make(Code::kCancelled, text("load(", options_.directory, "): interrupted"));
    // An estimate in proportion to the bytes read: what each segment delivers is not counted.
    const double share = static_cast<double>(bytes_read) / all;
    if (options_.progress) options_.progress(bytes_before + static_cast<int64_t>(wanted * share));
    return Status::ok();
  };
  if (plan.segments.empty()) return Status::ok();
  BCP_ASSIGN_OR_RETURN(const bool in_memory, io::is_in_memory(options_.directory, options_.io_timeout_s));
  if (!in_memory || !destinations_.is_plain()) return read_ahead(std::move(plan.segments), after_segment);
  SourceFiles files(options_.directory, *manifest_);
  MemoryLoad load(&files, plan.segments, &destinations_, options_.trace);
  BCP_RETURN_IF_ERROR(load.run(options_.num_io_threads, after_segment));
  return check_unchanged_files(plan.segments);
}

Status LoadJob::check_unchanged_files(const std::vector<planner::ReadSegment>& segments) const {
  if (!manifest_->foreign.has_value() || io::is_url(options_.directory)) return Status::ok();
  std::vector<uint32_t> files;
  for (const planner::ReadSegment& segment : segments) {
    if (files.empty() || files.back() != segment.file) files.push_back(segment.file);
  }
  return io::run_with_deadline(options_.io_timeout_s, "open", options_.directory,
                               [directory = options_.directory, manifest = manifest_, files = std::move(files)] {
                                 return check_unchanged(directory, *manifest, files);
                               });
}

Status LoadJob::read_ahead(std::vector<planner::ReadSegment> segments, const MemoryLoad::AfterSegment& after_segment) {
  BCP_ASSIGN_OR_RETURN(staging::BorrowedRing ring, staging::BorrowedRing::borrow(options_.ring_bytes));
  ring->pin(destinations_.any_device());
  const int num_slots = ring->num_slots();
  const ReadPipelineHolder reading(
      new ReadPipeline(options_.reading(), manifest_, staging::BorrowedRing::shared(std::move(ring)),
                       std::move(segments), num_slots),
      io::DeleteInBackground{options_.io_timeout_s > 0});
  base::TraceLane* const lane = base::lane_of(options_.trace, "scatter");
  int64_t bytes_read = 0;
  size_t num_left = reading->segments().size();
  while (const auto filled = reading->next()) {
    BCP_RETURN_IF_ERROR(filled->status);
    const planner::ReadSegment& segment = reading->segments()[filled->request.tag];
    const int64_t bytes = filled->request.wanted;
    const uint8_t* slot = reading->slot(filled->slot);
    BCP_ASSIGN_OR_RETURN(const auto file, reading->file(segment.file));
    {
      const base::SpanTimer timer(lane, base::Phase::kVerify, bytes);
      BCP_RETURN_IF_ERROR(destinations_.check(slot, segment, bytes, *file));
    }
    {
      const base::SpanTimer timer(lane, base::Phase::kScatter, bytes);
      BCP_RETURN_IF_ERROR(destinations_.scatter(slot, segment, bytes, *file));
    }
    reading->reader().release(filled->slot);
    --num_left;
    bytes_read += segment.bytes;
    BCP_RETURN_IF_ERROR(after_segment(bytes_read));
  }
  if (num_left == 0) return check_unchanged_files(reading->segments());
  // Never report what was not read as loaded.
  return Status::make(Code::kStorage, text("load(", options_.directory, "): ", num_left, " ranges were not read"),
                      options_.directory, EIO);
}

Status LoadJob::explain(Status failure) const {
  if (failure.code() != Code::kCorrupt && !io::may_be_late(failure)) return failure;
  if (manifest_->foreign.has_value()) {
    const Status changed = io::run_with_deadline(
        options_.io_timeout_s, "open", options_.directory,
        [directory = options_.directory, manifest = manifest_] { return check_all_unchanged(directory, *manifest); });
    if (changed.code() == Code::kChanged) return changed;
  }
  const auto changed = [&](std::string_view how) {
    return Status::make(Code::kChanged,
                        text("load(", options_.directory, "): ", how, " while it was read (", failure.message(), ")"),
                        options_.directory);
  };
  // Where a file is seen late, or its name is still seen after its removal, a later look tells which it is.
  const bool is_missing = io::may_be_late(failure);
  bool is_same = false, is_replaced = false, is_gone = false;
  const Status unseen = io::ask_until_seen(options_.directory, options_.visibility_timeout_s, [&]() -> Status {
    const auto current = io::run_with_deadline(
        options_.io_timeout_s, "open", options_.directory,
        [directory = options_.directory, scope = options_.scope] { return open_checkpoint(directory, {scope}); });
    is_same = current.is_ok() && current.value().save_id == manifest_->save_id;
    is_replaced = current.is_ok() && !is_same;
    is_gone = !current.is_ok() && current.status().code() == Code::kNotFound;
    return is_missing && is_same ? look_for(failure.path()) : Status::ok();
  });
  if (is_replaced) return changed("a newer commit replaced the checkpoint");
  // Damaged bytes are damage, whatever has become of the mark.
  if (is_gone && is_missing) {
    Status removed = io::run_with_deadline(options_.io_timeout_s, "open", options_.directory,
                                           [directory = options_.directory, scope = options_.scope, failure] {
                                             return explain_removed("load", directory, scope, failure);
                                           });
    if (removed.code() == Code::kNotFound) return removed;
  }
  if (!is_missing) return failure;
  if (unseen.is_ok() && is_same) return changed("a file was seen late");
  // It is still the same checkpoint, so a missing file is damage, unless it may be seen yet.
  if (io::look_anew(options_.directory)) {
    return Status::make(Code::kStorage,
                        text("it is not known whether this checkpoint is damaged: ", failure.message(),
                             "; the file system may show late what another machine has written, and was asked for ",
                             static_cast<int64_t>(std::ceil(options_.visibility_timeout_s)),
                             " s (visibility_timeout_s): load again, or verify it on the "
                             "machine that wrote it"),
                        failure.path(), failure.sys_errno());
  }
  if (failure.code() == Code::kCorrupt) return failure;
  return Status::make(Code::kCorrupt, text("a data file of the checkpoint is missing: ", failure.message()),
                      failure.path(), ENOENT);
}

Status LoadJob::look_for(const std::string& path) const {
  for (const format::FileEntry& file : manifest_->files) {
    if (io::join(options_.directory, file.name) != path) continue;
    if (manifest_->foreign.has_value()) return io::File::open(options_.directory, file.name, false).status();
    return check_files(options_.directory, {file});
  }
  return Status::ok();
}

}  // namespace bytecheckpoint::engine
