// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/reader.h"

#include <algorithm>
#include <system_error>

#include "csrc/base/named_thread.h"

namespace bytecheckpoint::io {
namespace {

/// When a read takes too long: more than so many times as long as others did, and never earlier than this.
constexpr int kTimesTheMean = 4;
constexpr std::chrono::milliseconds kLeastTooLong{500};
/// As long as no read has ended, there is nothing to compare with.
constexpr std::chrono::seconds kTooLongAtFirst{10};

}  // namespace

Reader::Reader(int num_threads, int num_slots, Source source, std::function<uint8_t*(int)> slot_bytes,
               double io_timeout_s, std::string place, bool doubles_slow_reads, std::shared_ptr<base::Trace> trace)
    : place_(std::move(place)),
      doubles_slow_reads_(doubles_slow_reads),
      trace_(std::move(trace)),
      pending_(num_threads, io_timeout_s),
      source_(std::move(source)),
      running_(num_threads),
      slot_bytes_(std::move(slot_bytes)),
      free_(static_cast<size_t>(num_slots)),
      // Room for every slot and for one failure of each thread: a push to it never blocks.
      filled_(static_cast<size_t>(num_slots + num_threads)) {
  for (int slot = 0; slot < num_slots; ++slot) free_.push(slot);
  try {
    for (int t = 0; t < num_threads; ++t) {
      threads_.push_back(base::named_thread("bcp-read", [this, t] { run(t); }));
    }
  } catch (const std::system_error&) {
    stop();
    throw;
  }
  if (num_threads == 0) filled_.close();  // the last thread does this otherwise
}

Reader::~Reader() {
  stop();
}

void Reader::stop() {
  free_.close();
  filled_.close();
  {
    base::MutexLock lock(mutex_);
    exhausted_ = stopped_ = true;
    changed_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

std::optional<FilledSlot> Reader::next() {
  if (!pending_.is_bounded()) return filled_.pop();
  for (;;) {
    bool is_over = false;
    std::optional<FilledSlot> filled = filled_.pop_for(PendingCalls::kLook, &is_over);
    if (filled.has_value() || is_over) return filled;
    base::Status pending = pending_.status();
    if (!pending.is_ok()) return FilledSlot{-1, {}, std::move(pending)};
  }
}

std::optional<FilledSlot> Reader::try_next() {
  std::optional<FilledSlot> filled = filled_.try_pop();
  if (filled.has_value()) return filled;
  base::Status pending = pending_.status();
  if (!pending.is_ok()) filled = FilledSlot{-1, {}, std::move(pending)};
  return filled;
}

int Reader::num_doubled() {
  base::MutexLock lock(mutex_);
  return num_doubled_;
}

std::shared_ptr<Reader::Reading> Reader::pull(int thread) {
  base::MutexLock lock(mutex_);
  if (exhausted_) return nullptr;
  pending_.begin(thread, "open", place_);
  base::Result<std::optional<ReadRequest>> request = source_();
  pending_.end(thread);
  if (!request.is_ok() || !request.value().has_value()) {
    // Under the mutex: once the source is known to be exhausted, another thread may close the queue.
    if (!request.is_ok()) filled_.push(FilledSlot{-1, {}, request.status()});
    exhausted_ = true;
    changed_.notify_all();
    return nullptr;
  }
  auto reading = std::make_shared<Reading>(Reading{std::move(*request.value()), Clock::now(), {thread}});
  unanswered_.push_back(reading);
  return reading;
}

Reader::Clock::duration Reader::too_long() const {
  if (num_read_ == 0) return kTooLongAtFirst;
  return std::max<Clock::duration>(kLeastTooLong, kTimesTheMean * time_read_ / num_read_);
}

std::shared_ptr<Reader::Reading> Reader::wait_for_slow(int thread) {
  base::MutexLock lock(mutex_);
  while (doubles_slow_reads_ && !stopped_ && !unanswered_.empty()) {
    std::shared_ptr<Reading> slowest;
    for (const auto& reading : unanswered_) {
      if (!reading->is_doubled && (slowest == nullptr || reading->since < slowest->since)) slowest = reading;
    }
    if (slowest == nullptr) break;
    const Clock::time_point due = slowest->since + too_long();
    if (Clock::now() >= due) {
      slowest->is_doubled = true;
      slowest->threads.push_back(thread);
      ++num_doubled_;
      return slowest;
    }
    changed_.wait_until(lock, due);
  }
  return nullptr;
}

bool Reader::read(int thread, const std::shared_ptr<Reading>& reading, int slot, base::TraceLane* lane) {
  const ReadRequest& request = reading->request;
  pending_.begin(thread, "pread", request.file->path());
  const auto read_now = [&] {
    const base::SpanTimer timer(lane, base::Phase::kRead, request.wanted);
    return request.file->read_at(slot_bytes_(slot), request.size, request.offset, request.wanted);
  };
  const base::Result<int64_t> got = read_now();
  pending_.end(thread);
  bool answers = false;
  {
    base::MutexLock lock(mutex_);
    std::vector<int>& others = reading->threads;
    others.erase(std::find(others.begin(), others.end(), thread));
    // A failure counts if no other thread may still succeed.
    answers = !reading->is_answered && (got.is_ok() || others.empty());
    if (answers) {
      reading->is_answered = true;
      for (const int other : others) pending_.end(other);  // nobody waits for that thread any more
      ++num_read_;
      base::add_bytes_done(trace_, request.wanted);
      time_read_ += Clock::now() - reading->since;
    }
  }
  const bool is_filled = answers && got.is_ok();
  if (answers) filled_.push(FilledSlot{is_filled ? slot : -1, request, got.status()});
  if (!is_filled) free_.push(slot);
  if (answers) {
    base::MutexLock lock(mutex_);
    unanswered_.erase(std::find(unanswered_.begin(), unanswered_.end(), reading));
    changed_.notify_all();
    close_if_over();
  }
  return got.is_ok();
}

void Reader::close_if_over() {
  if (running_ == 0 || (doubles_slow_reads_ && exhausted_ && unanswered_.empty())) filled_.close();
}

void Reader::run(int thread) {
  base::TraceLane* const lane = base::lane_of(trace_, "read " + std::to_string(thread));
  // Takes the slot before the request, so that every request that was taken is answered.
  while (const auto slot = free_.pop()) {
    std::shared_ptr<Reading> reading = pull(thread);
    if (reading == nullptr) reading = wait_for_slow(thread);
    if (reading == nullptr) {
      // Other threads may wait for a slot, only to find that nothing is left to read.
      free_.push(*slot);
      break;
    }
    if (!read(thread, reading, *slot, lane)) break;
  }
  base::MutexLock lock(mutex_);
  --running_;
  changed_.notify_all();
  close_if_over();
}

}  // namespace bytecheckpoint::io
