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
      niceness_(options.niceness),
      trace_(options.trace),
      pending_(0, options.io_timeout_s) {
  try {
    add_threads(options.num_threads);
  } catch (const std::system_error&) {
    stop();
    throw;
  }
}

void Writer::add_threads(int num_threads) {
  pending_.add_threads(num_threads);
  threads_.reserve(threads_.size() + static_cast<size_t>(num_threads));
  for (int added = 0; added < num_threads; ++added) {
    threads_.push_back(base::named_thread("bcp-write", [this, t = static_cast<int>(threads_.size())] {
      base::add_niceness(niceness_);
      run(t);
    }));
    base::MutexLock lock(mutex_);
    ++running_;
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

void Writer::count(int64_t bytes) {
  base::MutexLock lock(mutex_);
  bytes_written_ += bytes;
  base::add_bytes_done(trace_, bytes);
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

base::Status Writer::carry_out(const WriteRequest& request, int thread, base::TraceLane* lane) {
  const bool is_sync = request.slot < 0;
  pending_.begin(thread, is_sync ? "fsync" : "pwrite", request.file->path());
  base::Status outcome;
  {
    const base::SpanTimer timer(lane, is_sync ? base::Phase::kSync : base::Phase::kWrite, request.size);
    outcome = is_sync ? request.file->sync() : request.file->write_at(request.pieces, request.offset);
  }
  pending_.end(thread);
  if (!is_sync) BCP_FAILPOINT(kWriteData);
  return outcome;
}

void Writer::run(int thread) {
  base::TraceLane* const lane = base::lane_of(trace_, "write " + std::to_string(thread));
  while (const auto request = queue_.pop()) {
    wait_for_turn(request->size);
    base::Status outcome = status();
    if (outcome.is_ok()) outcome = carry_out(*request, thread, lane);
    {
      base::MutexLock lock(mutex_);
      if (outcome.is_ok()) {
        bytes_written_ += request->size;
        base::add_bytes_done(trace_, request->size);
      } else {
        fail(std::move(outcome));
      }
    }
    if (request->slot >= 0) released_(request->slot);
    base::MutexLock lock(mutex_);
    if (--unwritten_ == 0) ended_.notify_all();
  }
  base::MutexLock lock(mutex_);
  if (--running_ == 0) ended_.notify_all();
}

}  // namespace bytecheckpoint::io
