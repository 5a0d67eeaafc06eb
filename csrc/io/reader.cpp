// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/reader.h"

namespace bytecheckpoint::io {

Reader::Reader(int num_threads, int num_slots, Source source, std::function<uint8_t*(int)> slot_bytes)
    : source_(std::move(source)),
      running_(num_threads),
      slot_bytes_(std::move(slot_bytes)),
      free_(static_cast<size_t>(num_slots)),
      // Room for every slot and for one failure of each thread: a push to it never blocks.
      filled_(static_cast<size_t>(num_slots + num_threads)) {
  for (int slot = 0; slot < num_slots; ++slot) free_.push(slot);
  for (int t = 0; t < num_threads; ++t) threads_.emplace_back([this] { run(); });
}

Reader::~Reader() {
  free_.close();
  filled_.close();
  {
    base::MutexLock lock(mutex_);
    exhausted_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

std::optional<FilledSlot> Reader::next() {
  return filled_.pop();
}

std::optional<FilledSlot> Reader::try_next() {
  return filled_.try_pop();
}

base::Result<std::optional<ReadRequest>> Reader::pull() {
  base::MutexLock lock(mutex_);
  if (exhausted_) return std::optional<ReadRequest>();
  base::Result<std::optional<ReadRequest>> request = source_();
  if (!request.is_ok() || !request.value().has_value()) exhausted_ = true;
  return request;
}

void Reader::run() {
  // The slot comes first: a request that was pulled is always answered.
  while (const auto slot = free_.pop()) {
    base::Result<std::optional<ReadRequest>> request = pull();
    if (!request.is_ok()) {
      filled_.push(FilledSlot{-1, {}, request.status()});
      free_.push(*slot);
      break;
    }
    if (!request.value().has_value()) {
      // Others may be waiting for a slot, only to learn that there is nothing left to read.
      free_.push(*slot);
      break;
    }
    FilledSlot filled{*slot, *request.value(), {}};
    base::Result<int64_t> got = filled.request.file->read_at(slot_bytes_(*slot), filled.request.size,
                                                             filled.request.offset, filled.request.wanted);
    filled.status = got.status();
    const bool failed = !got.is_ok();
    if (failed) filled.slot = -1;
    filled_.push(std::move(filled));
    if (failed) {
      free_.push(*slot);
      break;
    }
  }
  base::MutexLock lock(mutex_);
  if (--running_ == 0) filled_.close();
}

}  // namespace bytecheckpoint::io
