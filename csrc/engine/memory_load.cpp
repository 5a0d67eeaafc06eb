// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/memory_load.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <string>
#include <thread>
#include <utility>

#include "csrc/base/named_thread.h"
#include "csrc/format/data_file.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::engine {
namespace {

using base::Phase;
using base::Status;

constexpr int64_t kCachedBytes = format::kBlockBytes;  // of which a CRC is known; fits into the cache of a core

/// Sums up how long the pieces of a segment took in each phase, and adds them to a lane at the end.
class PhaseTimes {
 public:
  PhaseTimes(base::TraceLane* lane, int64_t bytes)
      : lane_(lane), bytes_(bytes), begin_ns_(now()), last_ns_(begin_ns_) {}
  ~PhaseTimes() {
    for (size_t p = 0; lane_ != nullptr && p < std::size(kPhases); ++p) {
      lane_->add_span({kPhases[p], begin_ns_, last_ns_, busy_ns_[p], 1, bytes_});
    }
  }
  PhaseTimes(const PhaseTimes&) = delete;
  PhaseTimes& operator=(const PhaseTimes&) = delete;

  /// Counts the time since the last call.
  void count(Phase phase) {
    const int64_t now_ns = now();
    busy_ns_[std::find(std::begin(kPhases), std::end(kPhases), phase) - std::begin(kPhases)] += now_ns - last_ns_;
    last_ns_ = now_ns;
  }

 private:
  static constexpr Phase kPhases[] = {Phase::kRead, Phase::kVerify, Phase::kScatter};

  int64_t now() const { return lane_ == nullptr ? 0 : base::now_ns(); }

  base::TraceLane* const lane_;
  const int64_t bytes_;
  const int64_t begin_ns_;
  int64_t last_ns_;
  int64_t busy_ns_[std::size(kPhases)] = {};
};

}  // namespace

MemoryLoad::MemoryLoad(SourceFiles* files, const std::vector<planner::ReadSegment>& segments,
                       Destinations* destinations, std::shared_ptr<base::Trace> trace)
    : files_(files),
      segments_(segments),
      destinations_(destinations),
      trace_(std::move(trace)),
      source_(files, /*direct_io=*/false, pointers_to(segments)) {}

Status MemoryLoad::run(int num_threads, const AfterSegment& after_segment) {
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> num_others{0};
  base::work_together("bcp-read", static_cast<size_t>(num_threads), [&] {
    const bool is_caller = std::this_thread::get_id() == caller;
    base::TraceLane* const lane = base::lane_of(trace_, is_caller ? "scatter" : "read " + std::to_string(num_others++));
    std::vector<uint8_t> buffer(kCachedBytes);
    while (const std::optional<io::ReadRequest> request = take()) {
      Status outcome = read(*request, buffer.data(), lane);
      int64_t bytes_read;
      {
        const base::MutexLock lock(mutex_);
        bytes_read = bytes_read_ += segments_[request->tag].bytes;
      }
      if (outcome.is_ok() && is_caller) outcome = after_segment(bytes_read);
      note(std::move(outcome));
    }
  });
  int64_t bytes_read;
  {
    const base::MutexLock lock(mutex_);
    BCP_RETURN_IF_ERROR(outcome_);
    bytes_read = bytes_read_;
  }
  return after_segment(bytes_read);  // what the last segment was, if another thread has read it
}

std::optional<io::ReadRequest> MemoryLoad::take() {
  const base::MutexLock lock(mutex_);
  if (!outcome_.is_ok()) return std::nullopt;
  base::Result<std::optional<io::ReadRequest>> request = source_.next();
  if (request.is_ok()) return std::move(request.value());
  outcome_ = request.status();
  return std::nullopt;
}

Status MemoryLoad::read(const io::ReadRequest& request, uint8_t* buffer, base::TraceLane* lane) {
  planner::ReadSegment piece = segments_[request.tag];
  const auto file = files_->find(piece.file);  // `source_` has opened it
  PhaseTimes times(lane, request.wanted);
  for (int64_t done = 0; done < request.wanted; done += kCachedBytes) {
    piece.offset = request.offset + done;
    piece.bytes = std::min(kCachedBytes, request.wanted - done);
    BCP_RETURN_IF_ERROR(request.file->read_at(buffer, piece.bytes, piece.offset, piece.bytes).status());
    times.count(Phase::kRead);
    BCP_RETURN_IF_ERROR(destinations_->check(buffer, piece, piece.bytes, *file));
    times.count(Phase::kVerify);
    BCP_RETURN_IF_ERROR(destinations_->scatter(buffer, piece, piece.bytes, *file));
    times.count(Phase::kScatter);
    base::add_bytes_done(trace_, piece.bytes);
  }
  return Status::ok();
}

void MemoryLoad::note(Status outcome) {
  if (outcome.is_ok()) return;
  const base::MutexLock lock(mutex_);
  if (outcome_.is_ok()) outcome_ = std::move(outcome);
}

}  // namespace bytecheckpoint::engine
