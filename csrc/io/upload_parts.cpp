// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/upload_parts.h"

#include <utility>

namespace bytecheckpoint::io {

base::Status UploadParts::write(const uint8_t* bytes, int64_t size, int64_t offset) {
  const auto part = std::make_shared<Part>();
  part->bytes = bytes;
  part->size = size;
  base::MutexLock lock(mutex_);
  waiting_[offset] = part;
  changed_.notify_all();
  // After a failure a part that the client never got is not released by anybody.
  const auto is_done = [&] { return part->is_released || (!failure_.is_ok() && waiting_.erase(offset) > 0); };
  changed_.wait(lock, is_done);
  return failure_;
}

std::shared_ptr<const UploadParts::Part> UploadParts::next() {
  base::MutexLock lock(mutex_);
  auto found = waiting_.end();
  changed_.wait(lock, [&] {
    found = waiting_.find(next_offset_);
    return found != waiting_.end() || is_over_ || !failure_.is_ok();
  });
  if (found == waiting_.end() || !failure_.is_ok()) return nullptr;
  std::shared_ptr<const Part> part = std::move(found->second);
  waiting_.erase(found);
  next_offset_ += part->size;
  is_over_ = is_over_ || part->size < part_bytes_;
  return part;
}

void UploadParts::release(const Part& part) {
  base::MutexLock lock(mutex_);
  const_cast<Part&>(part).is_released = true;
  changed_.notify_all();
}

void UploadParts::end() {
  base::MutexLock lock(mutex_);
  is_over_ = true;
  changed_.notify_all();
}

void UploadParts::fail(base::Status failure) {
  base::MutexLock lock(mutex_);
  if (failure_.is_ok()) failure_ = std::move(failure);
  changed_.notify_all();
}

base::Status UploadParts::status() {
  base::MutexLock lock(mutex_);
  return failure_;
}

}  // namespace bytecheckpoint::io
