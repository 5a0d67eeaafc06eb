// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/shared_run.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "csrc/base/crc32.h"
#include "csrc/base/varint.h"
#include "csrc/format/data_file.h"

namespace bytecheckpoint::engine {

using base::Code;
using base::Status;
using base::text;

namespace {

/// Whether `segments` are exactly the blocks of `ranges`.
bool cover(const std::vector<planner::ReadSegment>& segments, const std::vector<planner::BlockRange>& ranges) {
  size_t s = 0;
  for (const planner::BlockRange& range : ranges) {
    int64_t position = range.begin;
    for (; s < segments.size() && segments[s].file == range.file && segments[s].offset == position; ++s) {
      position += segments[s].bytes;
      if (position >= range.end) {
        ++s;
        break;
      }
    }
    if (position != range.end) return false;
  }
  return s == segments.size();
}

}  // namespace

std::vector<SharedUnit> units_of(const planner::SharePlan& plan, uint32_t rank) {
  std::unordered_map<planner::RankSets::Id, bool> is_in;
  std::vector<SharedUnit> units;
  for (const planner::ShareUnit& unit : plan.units) {
    const auto [known, is_new] = is_in.try_emplace(unit.wanted_by, false);
    if (is_new) plan.sets.for_each(unit.wanted_by, [&, found = &known->second](uint32_t r) { *found |= r == rank; });
    if (!known->second) continue;
    SharedUnit mine{{unit.file, unit.offset, unit.bytes, {}}, unit.owner, {}};
    plan.sets.for_each(unit.wanted_by, [&](uint32_t r) { mine.wanted_by.push_back(r); });
    units.push_back(std::move(mine));
  }
  return units;
}

planner::WantedBlocks wanted_blocks(LoadJob* job) {
  return planner::find_wanted_blocks(job->destinations().wanted(), format::kBlockBytes);
}

uint32_t digest_of(const format::Manifest& manifest) {
  base::VarintWriter out;
  out.raw(base::to_hex(manifest.save_id));
  for (const format::FileEntry& file : manifest.files) {
    out.number(file.name.size());
    out.raw(file.name);
    out.number(static_cast<uint64_t>(file.bytes));
    out.number(file.trailer_crc);
  }
  const std::string all = out.take();
  return base::crc32(0, all.data(), all.size());
}

SharedRun::SharedRun(LoadJob* job, uint32_t rank, const SharedMemory* memory)
    : job_(job), rank_(rank), memory_(memory), lane_(base::lane_of(job->options().trace, "scatter")) {}

SharedRun::~SharedRun() {
  if (!is_finished_) job_->destinations().clear();
}

base::Result<std::unique_ptr<SharedRun>> SharedRun::start(LoadJob* job, const planner::SharePlan& plan, uint32_t rank,
                                                          SharedMemory* memory) {
  const planner::WantedBlocks blocks = wanted_blocks(job);
  std::unique_ptr<SharedRun> run(new SharedRun(job, rank, memory));
  run->units_ = units_of(plan, rank);
  std::vector<planner::ReadSegment> segments;
  for (const SharedUnit& unit : run->units_) segments.push_back(unit.segment);
  if (!cover(segments, blocks.merged())) {
    return Status::make(Code::kInvalidArgument,
                        text("load(", job->options().directory,
                             "): the plan of all ranks does not contain all that rank ", rank, " asks for"));
  }
  planner::note_wanted(blocks, &segments);
  LoadStats& stats = run->stats_;
  std::vector<planner::ReadSegment> to_read;
  bool any_message = false;
  for (size_t u = 0; u < segments.size(); ++u) {
    SharedUnit& unit = run->units_[u];
    unit.segment = std::move(segments[u]);
    if (u == 0 || run->units_[u - 1].segment.file != unit.segment.file) ++stats.num_files;
    if (unit.owner == rank) {
      run->own_.push_back(u);
      to_read.push_back(unit.segment);
      stats.bytes_read += unit.segment.bytes;
    } else {
      stats.bytes_received += unit.segment.bytes;
      any_message = any_message || memory == nullptr || memory->of_peer(unit.owner) == nullptr;
    }
  }
  stats.num_boxes = static_cast<int64_t>(job->destinations().wanted().size());
  stats.bytes_wanted = blocks.bytes_wanted;
  if (run->units_.empty()) return run;

  std::shared_ptr<staging::SlotRing> ring;
  if (memory != nullptr) {
    ring = memory->lend();
  } else {
    BCP_ASSIGN_OR_RETURN(auto borrowed, staging::BorrowedRing::borrow(job->options().ring_bytes));
    ring = staging::BorrowedRing::shared(std::move(borrowed));
  }
  // Not the rings of peers, which are read only: copies from them are slower.
  ring->pin(job->destinations().any_device());
  const int num_slots = ring->num_slots();
  run->num_own_slots_ = to_read.empty() ? 0 : any_message ? num_slots - num_slots / 2 : num_slots;
  run->reading_ = ReadPipelineHolder(new ReadPipeline(job->options().reading(), job->manifest(), std::move(ring),
                                                      std::move(to_read), run->num_own_slots_),
                                     io::DeleteInBackground{job->options().io_timeout_s > 0});
  return run;
}

const uint8_t* SharedRun::memory_of(size_t unit, int index) const {
  if (unit >= units_.size() || index < 0) return nullptr;
  const uint32_t owner = units_[unit].owner;
  const staging::PeerRing* peer = memory_ == nullptr || owner == rank_ ? nullptr : memory_->of_peer(owner);
  if (peer != nullptr) return index < peer->num_slots() ? peer->slot(index) : nullptr;
  return index < num_slots() ? slot(index) : nullptr;
}

base::Result<std::optional<SharedRun::Own>> SharedRun::next_own(bool wait) {
  if (next_own_ == own_.size()) return std::optional<Own>();
  while (read_.count(next_own_) == 0) {
    std::optional<io::FilledSlot> filled = wait ? reading_->next() : reading_->reader().try_next();
    if (!filled.has_value() && wait) {
      return Status::make(Code::kStorage, text("load: ", own_.size() - next_own_, " ranges were not read"), {}, EIO);
    }
    if (!filled.has_value()) return std::optional<Own>();
    if (!filled->status.is_ok()) return job_->explain(filled->status);
    const size_t place = filled->request.tag;
    read_.emplace(place, std::move(*filled));
  }
  const auto found = read_.find(next_own_);
  const Own own{own_[next_own_], found->second.slot, found->second.request.wanted};
  read_.erase(found);
  ++next_own_;
  Status checked = check(own.unit, slot(own.slot), own.bytes);
  if (!checked.is_ok()) return checked;
  return std::optional<Own>(own);
}

Status SharedRun::check(size_t unit, const uint8_t* slot, int64_t bytes, bool is_verified) {
  const planner::ReadSegment& segment = units_[unit].segment;
  const auto file = reading_->file(segment.file);
  if (!file.is_ok()) return job_->explain(file.status());
  const int64_t there = bytes_there(segment, *file.value());
  if (bytes != there) {
    return job_->explain(
        Status::make(Code::kCorrupt,
                     text("read(", file.value()->path, ", offset=", segment.offset, "): rank ", units_[unit].owner,
                          " read ", bytes, " bytes, but on this rank the file has ", there),
                     file.value()->path));
  }
  if (is_verified) return Status::ok();
  const base::SpanTimer timer(lane_, base::Phase::kVerify, bytes);
  Status checked = job_->destinations().check(slot, segment, bytes, *file.value());
  return checked.is_ok() ? checked : job_->explain(std::move(checked));
}

Status SharedRun::scatter(size_t unit, const uint8_t* slot, int64_t bytes) {
  const planner::ReadSegment& segment = units_[unit].segment;
  const auto file = reading_->file(segment.file);
  if (!file.is_ok()) return job_->explain(file.status());
  Status done;
  {
    const base::SpanTimer timer(lane_, base::Phase::kScatter, bytes);
    done = job_->destinations().scatter(slot, segment, bytes, *file.value());
  }
  if (!done.is_ok()) return job_->explain(std::move(done));
  if (!job_->options().progress) return done;
  bytes_scattered_ += segment.bytes;
  const double share =
      static_cast<double>(bytes_scattered_) / static_cast<double>(stats_.bytes_read + stats_.bytes_received);
  job_->options().progress(static_cast<int64_t>(static_cast<double>(stats_.bytes_wanted) * share));
  return done;
}

base::Result<LoadStats> SharedRun::finish() {
  Status archives = job_->destinations().check_archives();
  if (!archives.is_ok()) return job_->explain(std::move(archives));
  if (reading_ != nullptr) {
    Status changed = job_->check_unchanged_files(reading_->segments());
    if (!changed.is_ok()) return changed;
  }
  is_finished_ = true;
  reading_.reset();  // so that the ring is free for the next run
  (void)job_->destinations().begin_next_phase();
  stats_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  return stats_;
}

}  // namespace bytecheckpoint::engine
