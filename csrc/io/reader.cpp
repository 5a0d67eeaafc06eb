// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/reader.h"

#include <system_error>

#include "csrc/base/named_thread.h"

namespace bytecheckpoint::io {

Reader::Reader(int num_threads, int num_slots, Source source, std::function<uint8_t*(int)> slot_bytes,
               double io_timeout_s, std::string place)
    : place_(std::move(place)),
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
    exhausted_ = true;
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

base::Result<std::optional<ReadRequest>> Reader::pull(int thread) {
  base::MutexLock lock(mutex_);
  if (exhausted_) return std::optional<ReadRequest>();
  pending_.begin(thread, "open", place_);
  base::Result<std::optional<ReadRequest>> request = source_();
  pending_.end(thread);
  if (!request.is_ok() || !request.value().has_value()) exhausted_ = true;
  return request;
}

void Reader::run(int thread) {
  // Takes the slot before the request, so that every request that was taken is answered.
  while (const auto slot = free_.pop()) {
    base::Result<std::optional<ReadRequest>> request = pull(thread);
    if (!request.is_ok()) {
      filled_.push(FilledSlot{-1, {}, request.status()});
      free_.push(*slot);
      break;
    }
    if (!request.value().has_value()) {
      // Other threads may wait for a slot, only to find that nothing is left to read.
      free_.push(*slot);
      break;
    }
    FilledSlot filled{*slot, *request.value(), {}};
    pending_.begin(thread, "pread", filled.request.file->path());
    base::Result<int64_t> got = filled.request.file->read_at(slot_bytes_(*slot), filled.request.size,
                                                             filled.request.offset, filled.request.wanted);
    pending_.end(thread);
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
