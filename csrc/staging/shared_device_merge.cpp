// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/shared_device_merge.h"

#include <unistd.h>

#include <algorithm>
#include <map>

#include "csrc/base/bytes.h"

namespace bytecheckpoint::staging {
namespace {

using base::Code;
using base::Result;
using base::Status;

using Found = Result<std::shared_ptr<SharedDeviceMerge>>;

/// The registry of the process. Never destroyed, because at the end of the process the driver may be gone before it.
struct Registry {
  const pid_t owner = ::getpid();
  base::Mutex mutex;
  std::map<int, Found> found BCP_GUARDED_BY(mutex);
};

Registry& registry() {
  static auto* const kRegistry = new Registry();
  return *kRegistry;
}

/// Called before any lock is taken: a thread of the parent may have held it when it forked.
Status check_process() {
  if (::getpid() == registry().owner) return Status::ok();
  return Status::make(Code::kUnsupported, "CUDA cannot be used in a forked child");
}

/// Unpins pages when they are about to be unmapped.
class Pin {
 public:
  Pin(int device, void* first) : device_(device), first_(first) {}
  // An error means that CUDA was shut down before the pages were unmapped.
  ~Pin() {
    if (check_process().is_ok()) static_cast<void>(DeviceMerge::unpin_pages(device_, first_));
  }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

 private:
  const int device_;
  void* const first_;
};

}  // namespace

Result<std::shared_ptr<SharedDeviceMerge>> SharedDeviceMerge::find(int device) {
  BCP_RETURN_IF_ERROR(check_process());
  Registry& all = registry();
  const base::MutexLock lock(all.mutex);
  const auto known = all.found.find(device);
  if (known != all.found.end()) return known->second;
  auto made = DeviceMerge::create(device);
  if (!made.is_ok()) {
    // This does not change, and `find` is called for every tensor, so it is remembered. Other errors may be temporary.
    if (made.status().code() == Code::kUnsupported) all.found.emplace(device, made.status());
    return made.status();
  }
  const std::shared_ptr<SharedDeviceMerge> merge(new SharedDeviceMerge(std::move(made.value())));
  all.found.emplace(device, merge);
  return merge;
}

void SharedDeviceMerge::drop_all() {
  if (!check_process().is_ok()) return;
  std::map<int, Found> dropped;  // destroyed without the lock: their destructors wait for the device
  {
    Registry& all = registry();
    const base::MutexLock lock(all.mutex);
    dropped.swap(all.found);
  }
}

Result<int64_t> SharedDeviceMerge::begin_gather(const std::vector<DevicePiece>& pieces, uint8_t* host,
                                                uintptr_t caller_stream) {
  BCP_RETURN_IF_ERROR(check_process());
  const base::MutexLock lock(mutex_);
  return merge_->begin_gather(pieces, host, caller_stream);
}

Result<int64_t> SharedDeviceMerge::begin_scatter(const std::vector<DevicePiece>& pieces, const uint8_t* host,
                                                 uintptr_t caller_stream) {
  BCP_RETURN_IF_ERROR(check_process());
  const base::MutexLock lock(mutex_);
  return merge_->begin_scatter(pieces, host, caller_stream);
}

Result<bool> SharedDeviceMerge::is_done(int64_t transfer) {
  BCP_RETURN_IF_ERROR(check_process());
  const base::MutexLock lock(mutex_);
  return merge_->is_done(transfer);
}

Status pin_pages(int device, int64_t bytes, Pages* pages) {
  if (bytes <= pages->held_bytes()) return Status::ok();
  BCP_RETURN_IF_ERROR(check_process());
  BCP_RETURN_IF_ERROR(pages->leave_out_of_forks());
  // Locks whole pages, but not the room that only a larger state would touch. It is locked in one piece, because a copy
  // must not cross from one locked piece into another.
  const int64_t pinned = std::min(base::align_up(bytes, kHugePageBytes), pages->bytes());
  pages->hold(nullptr, 0);
  const Status status = DeviceMerge::pin_pages(device, pages->first(), pinned);
  pages->hold(status.is_ok() ? std::make_shared<Pin>(device, pages->first()) : nullptr, pinned);
  return status;
}

}  // namespace bytecheckpoint::staging
