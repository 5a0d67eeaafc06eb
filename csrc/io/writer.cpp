// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/writer.h"

#include <algorithm>
#include <system_error>

#include "csrc/base/failpoint.h"
#include "csrc/base/named_thread.h"
#include "csrc/base/niceness.h"

namespace bytecheckpoint::io {

Writer::Writer(const WriterOptions& options, std::function<void(int)> released)
    : queue_(options.capacity),
      released_(std::move(released)),
      bytes_per_s_(options.bytes_per_s),
      trace_(options.trace),
      pending_(options.num_threads, options.io_timeout_s),
      running_(options.num_threads) {
  threads_.reserve(static_cast<size_t>(options.num_threads));
  try {
    for (int t = 0; t < options.num_threads; ++t) {
      threads_.push_back(base::named_thread("bcp-write", [this, t, niceness = options.niceness] {
        base::add_niceness(niceness);
        run(t);
      }));
    }
  } catch (const std::system_error&) {
    stop();
    throw;
  }
}

Writer::~Writer() {
  stop();
}

void Writer::stop() {
  queue_.close();
  for (std::thread& thread : threads_) thread.join();
}

void Writer::submit(WriteRequest request) {
  {
    base::MutexLock lock(mutex_);
    ++unwritten_;
  }
  queue_.push(std::move(request));
}

int64_t Writer::bytes_written() {
  base::MutexLock lock(mutex_);
  return bytes_written_;
}

void Writer::cancel() {
  base::MutexLock lock(mutex_);
  fail(base::Status::make(base::Code::kCancelled, "write: cancelled"));
}

void Writer::fail(base::Status failure) {
  if (first_failure_.is_ok()) first_failure_ = std::move(failure);
  failed_.notify_all();
}

base::Status Writer::status() {
  base::Status pending = pending_.status();
  base::MutexLock lock(mutex_);
  if (!pending.is_ok()) fail(std::move(pending));
  return first_failure_;
}

base::Status Writer::drain() {
  return wait_until_zero(unwritten_);
}

base::Status Writer::finish() {
  queue_.close();
  return wait_until_zero(running_);
}

base::Status Writer::wait_until_zero(const int64_t& count) {
  base::MutexLock lock(mutex_);
  const auto is_zero = [&count] { return count == 0; };
  if (!is_bounded()) ended_.wait(lock, is_zero);
  while (!ended_.wait_for(lock, PendingCalls::kLook, is_zero)) {
    base::Status pending = pending_.status();
    if (pending.is_ok()) continue;
    fail(std::move(pending));
    break;
  }
  return first_failure_;
}

void Writer::wait_for_turn(int64_t bytes) {
  if (bytes_per_s_ == 0) return;
  base::MutexLock lock(mutex_);
  const auto turn = std::max(next_turn_, std::chrono::steady_clock::now());
  const std::chrono::duration<double> taken(static_cast<double>(bytes) / static_cast<double>(bytes_per_s_));
  next_turn_ = turn + std::chrono::duration_cast<std::chrono::steady_clock::duration>(taken);
  failed_.wait_until(lock, turn, [&] { return !first_failure_.is_ok(); });
}

void Writer::run(int thread) {
  base::TraceLane* const lane = base::lane_of(trace_, "write " + std::to_string(thread));
  while (const auto request = queue_.pop()) {
    wait_for_turn(request->size);
    base::Status outcome = status();
    if (outcome.is_ok()) {
      pending_.begin(thread, "pwrite", request->file->path());
      {
        const base::SpanTimer timer(lane, base::Phase::kWrite, request->size);
        outcome = request->file->write_at(request->pieces, request->offset);
      }
      pending_.end(thread);
      BCP_FAILPOINT(kWriteData);
    }
    {
      base::MutexLock lock(mutex_);
      if (outcome.is_ok()) {
        bytes_written_ += request->size;
        base::add_bytes_done(trace_, request->size);
      } else {
        fail(std::move(outcome));
      }
      if (--unwritten_ == 0) ended_.notify_all();
    }
    released_(request->slot);
  }
  base::MutexLock lock(mutex_);
  if (--running_ == 0) ended_.notify_all();
}

}  // namespace bytecheckpoint::io
