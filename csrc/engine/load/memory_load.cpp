// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/memory_load.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "csrc/base/named_thread.h"
#include "csrc/format/data_file.h"
#include "csrc/io/file.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::engine {
namespace {

using base::Phase;
using base::Status;

/// Sums up how long the pieces of a segment took in each phase, and adds them to a lane at the end.
class PhaseTimes {
 public:
  explicit PhaseTimes(base::TraceLane* lane) : lane_(lane), begin_ns_(now()), last_ns_(begin_ns_) {}
  ~PhaseTimes() {
    for (size_t p = 0; lane_ != nullptr && p < std::size(kPhases); ++p) {
      lane_->add_span({kPhases[p], begin_ns_, last_ns_, busy_ns_[p], 1, bytes_[p]});
      lane_->count_size(kPhases[p], bytes_[p], busy_ns_[p]);
    }
  }
  PhaseTimes(const PhaseTimes&) = delete;
  PhaseTimes& operator=(const PhaseTimes&) = delete;

  /// Counts the time since the last call, and what was done in it.
  void count(Phase phase, int64_t bytes) {
    const auto p = static_cast<size_t>(std::find(std::begin(kPhases), std::end(kPhases), phase) - std::begin(kPhases));
    const int64_t now_ns = now();
    busy_ns_[p] += now_ns - last_ns_;
    bytes_[p] += bytes;
    last_ns_ = now_ns;
  }

 private:
  static constexpr Phase kPhases[] = {Phase::kRead, Phase::kVerify, Phase::kScatter};

  int64_t now() const { return lane_ == nullptr ? 0 : base::now_ns(); }

  base::TraceLane* const lane_;
  const int64_t begin_ns_;
  int64_t last_ns_;
  int64_t busy_ns_[std::size(kPhases)] = {};
  int64_t bytes_[std::size(kPhases)] = {};
};

}  // namespace

/// One thread, and what it uses again for each segment.
struct MemoryLoad::Worker {
  base::TraceLane* lane;
  std::vector<uint8_t> buffer{};
  std::vector<planner::ReadSegment> pieces{};
};

MemoryLoad::MemoryLoad(SourceFiles* files, const std::vector<planner::ReadSegment>& segments,
                       Destinations* destinations, std::shared_ptr<base::Trace> trace)
    : files_(files),
      segments_(segments),
      destinations_(destinations),
      trace_(std::move(trace)),
      source_(files, /*direct_io=*/false, segments) {}

Status MemoryLoad::run(int num_threads, const AfterSegment& after_segment) {
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> num_others{0};
  base::work_together("bcp-read", std::min(static_cast<size_t>(num_threads), segments_.size()), [&] {
    const bool is_caller = std::this_thread::get_id() == caller;
    try {
      Worker worker{base::lane_of(trace_, is_caller ? "scatter" : "read " + std::to_string(num_others++))};
      while (const std::optional<io::ReadRequest> request = take()) {
        Status outcome = read(*request, &worker);
        const bool is_read = outcome.is_ok();
        const int64_t bytes_read = note(std::move(outcome), segments_[request->tag].bytes);
        if (is_read && is_caller) note(after_segment(bytes_read), 0);
      }
    } catch (const std::bad_alloc&) {
      note(Status::make(base::Code::kStorage, "load: no memory for a buffer", "", ENOMEM), 0);
    }
  });
  int64_t bytes_read;
  {
    const base::MutexLock lock(mutex_);
    BCP_RETURN_IF_ERROR(outcome_);
    bytes_read = bytes_read_;
  }
  return after_segment(bytes_read);  // other threads may have read the last segments
}

std::optional<io::ReadRequest> MemoryLoad::take() {
  const base::MutexLock lock(mutex_);
  if (!outcome_.is_ok()) return std::nullopt;
  base::Result<std::optional<io::ReadRequest>> request = source_.next();
  if (request.is_ok()) return std::move(request.value());
  outcome_ = request.status();
  return std::nullopt;
}

void MemoryLoad::divide(const io::ReadRequest& request, int64_t piece_bytes,
                        std::vector<planner::ReadSegment>* pieces) const {
  const planner::ReadSegment& segment = segments_[request.tag];
  const auto num_pieces = static_cast<size_t>((request.wanted + piece_bytes - 1) / piece_bytes);
  pieces->resize(std::max(pieces->size(), num_pieces));
  for (size_t p = 0; p < num_pieces; ++p) {
    planner::ReadSegment& piece = (*pieces)[p];
    piece.file = segment.file;
    piece.offset = request.offset + static_cast<int64_t>(p) * piece_bytes;
    piece.bytes = std::min(piece_bytes, request.offset + request.wanted - piece.offset);
    piece.wanted.clear();
  }
  for (const uint32_t index : segment.wanted) {
    const auto [begin, end] = destinations_->range_in_file(index);
    const int64_t first = std::max<int64_t>(begin - request.offset, 0) / piece_bytes;
    for (auto p = static_cast<size_t>(first); p < num_pieces && (*pieces)[p].offset < end; ++p) {
      (*pieces)[p].wanted.push_back(index);
    }
  }
}

Status MemoryLoad::read(const io::ReadRequest& request, Worker* worker) const {
  const bool is_here = request.file->is_in_memory() || request.file->on_disk() != nullptr;
  // A block's CRC is known, and it fits into the cache of a core.
  const int64_t piece_bytes = is_here ? format::kBlockBytes : staging::kSlotBytes;
  worker->buffer.resize(std::max(worker->buffer.size(), static_cast<size_t>(piece_bytes)));
  divide(request, piece_bytes, &worker->pieces);
  const auto file = files_->find(segments_[request.tag].file);  // `source_` has opened it
  PhaseTimes times(worker->lane);
  for (int64_t done = 0; done < request.wanted; done += piece_bytes) {
    const planner::ReadSegment& piece = worker->pieces[static_cast<size_t>(done / piece_bytes)];
    uint8_t* const in_place = destinations_->memory_of(piece, *file);
    uint8_t* const to = in_place == nullptr ? worker->buffer.data() : in_place;
    BCP_RETURN_IF_ERROR(request.file->read_at(to, piece.bytes, piece.offset, piece.bytes).status());
    times.count(Phase::kRead, piece.bytes);
    BCP_RETURN_IF_ERROR(destinations_->check(to, piece, piece.bytes, *file));
    times.count(Phase::kVerify, piece.bytes);
    if (in_place == nullptr) BCP_RETURN_IF_ERROR(destinations_->scatter(to, piece, piece.bytes, *file));
    times.count(Phase::kScatter, piece.bytes);
    base::add_bytes_done(trace_, piece.bytes);
  }
  return Status::ok();
}

int64_t MemoryLoad::note(Status outcome, int64_t bytes) {
  const base::MutexLock lock(mutex_);
  if (outcome_.is_ok()) outcome_ = std::move(outcome);
  return bytes_read_ += bytes;
}

}  // namespace bytecheckpoint::engine
