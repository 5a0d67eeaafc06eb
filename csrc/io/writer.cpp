// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/writer.h"

#include "csrc/base/failpoint.h"
#include "csrc/base/niceness.h"

namespace bytecheckpoint::io {

Writer::Writer(int num_threads, size_t capacity, std::function<void(int)> released, int niceness)
    : queue_(capacity), released_(std::move(released)) {
  threads_.reserve(static_cast<size_t>(num_threads));
  for (int t = 0; t < num_threads; ++t) {
    threads_.emplace_back([this, niceness] {
      base::add_niceness(niceness);
      run();
    });
  }
}

Writer::~Writer() {
  (void)finish();
}

void Writer::submit(WriteRequest request) {
  queue_.push(request);
}

int64_t Writer::bytes_written() {
  base::MutexLock lock(mutex_);
  return bytes_written_;
}

void Writer::cancel() {
  base::MutexLock lock(mutex_);
  if (first_failure_.is_ok()) first_failure_ = base::Status::make(base::Code::kCancelled, "write: cancelled");
}

base::Status Writer::status() {
  base::MutexLock lock(mutex_);
  return first_failure_;
}

base::Status Writer::finish() {
  queue_.close();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  return status();
}

void Writer::run() {
  while (const auto request = queue_.pop()) {
    if (status().is_ok()) {
      base::Status outcome = request->file->write_at(request->bytes, request->size, request->offset);
      BCP_FAILPOINT(kWriteData);
      base::MutexLock lock(mutex_);
      if (outcome.is_ok()) {
        bytes_written_ += request->size;
      } else if (first_failure_.is_ok()) {
        first_failure_ = std::move(outcome);
      }
    }
    released_(request->slot);
  }
}

}  // namespace bytecheckpoint::io
