// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/arena.h"

#include <unistd.h>

#include <algorithm>

#include "csrc/base/bytes.h"
#include "csrc/staging/available_memory.h"

namespace bytecheckpoint::staging {
namespace {

using base::Code;
using base::Status;
using base::text;

/// Adds room to grow: the states of a job differ by little, and address space that nobody touches costs nothing.
int64_t with_room_to_grow(int64_t bytes) {
  return base::align_up(bytes + bytes / 8, kHugePageBytes);
}

}  // namespace

Arena& Arena::of_process() {
  static auto* const kArena = new Arena();  // never destroyed: leases may end while the process does
  return *kArena;
}

Arena::Arena() : owner_(::getpid()) {}

Status Arena::check_process() const {
  if (::getpid() == owner_) return Status::ok();
  return Status::make(Code::kUnsupported,
                      text("staging: this process is a forked child, and the memory belongs to process ", owner_,
                           ". Stage in that process, or start processes with 'spawn'"));
}

base::Result<std::shared_ptr<Lease>> Arena::try_lease(int64_t bytes, const ArenaTerms& terms) {
  BCP_RETURN_IF_ERROR(check_process());
  const base::MutexLock lock(mutex_);
  const auto num_states = static_cast<size_t>(std::clamp(terms.num_states, 1, static_cast<int>(regions_.size())));
  const auto num_leased = static_cast<size_t>(
      std::count_if(regions_.begin(), regions_.end(), [](const Region& region) { return region.is_leased; }));
  for (size_t r = 0; r < regions_.size() && num_leased < num_states; ++r) {
    if (regions_[r].is_leased) continue;
    BCP_RETURN_IF_ERROR(fit(bytes, terms, &regions_[r]));
    regions_[r].is_leased = true;
    regions_[r].bytes = bytes;
    regions_[r].since = std::chrono::steady_clock::now();
    regions_[r].what = terms.what;
    return std::shared_ptr<Lease>(new Lease(this, r, regions_[r].pages));
  }
  if (terms.limit_bytes != 0 && bytes > terms.limit_bytes) {
    // Too large in any case, so waiting would not help: returns kStagingFull.
    Region none;
    BCP_RETURN_IF_ERROR(fit(bytes, terms, &none));
  }
  return Status::make(Code::kStagingBusy, text("staging: ", num_leased, num_leased == 1 ? " state is" : " states are",
                                               " kept for saves under way, and no more are allowed"));
}

Status Arena::fit(int64_t bytes, const ArenaTerms& terms, Region* region) {
  if (terms.limit_bytes != 0 && bytes > terms.limit_bytes) {
    return Status::make(Code::kStagingFull, text("staging: the state takes ", bytes, " bytes, but may take at most ",
                                                 terms.limit_bytes, " (staging_bytes)"));
  }
  const bool is_of_kind = region->pages != nullptr && (!terms.is_shareable || region->pages->fd() >= 0);
  if (is_of_kind && region->pages->bytes() >= bytes) return Status::ok();
  // Freed before the new mapping, since both might not fit. Whoever still reads the old state keeps its pages.
  const int64_t given_back = region->pages == nullptr ? 0 : region->pages->bytes();
  region->pages.reset();
  const int64_t available = available_memory_bytes();
  if (terms.limit_bytes == 0 && available >= 0 && bytes > available) {
    return Status::make(
        Code::kStagingFull,
        text("staging: the state takes ", bytes, " bytes, but the system has only ", available, " left (", given_back,
             " bytes were given back for it); Config(staging_bytes=", bytes, ") uses that memory anyway"));
  }
  const int64_t mapped =
      terms.limit_bytes == 0 ? with_room_to_grow(bytes) : base::align_up(terms.limit_bytes, kHugePageBytes);
  BCP_ASSIGN_OR_RETURN(region->pages, terms.is_shareable ? Pages::map_shareable(mapped, "staging")
                                                         : Pages::map(mapped, "staging", Pages::InFork::kAbsent));
  return Status::ok();
}

Status Arena::prepare(int64_t bytes, const ArenaTerms& terms) {
  BCP_RETURN_IF_ERROR(check_process());
  const base::MutexLock lock(mutex_);
  if (regions_[0].is_leased) return Status::ok();
  BCP_RETURN_IF_ERROR(fit(bytes, terms, &regions_[0]));
  regions_[0].pages->populate(bytes);
  return Status::ok();
}

void Arena::wait_for_release(std::chrono::milliseconds timeout) {
  if (::getpid() != owner_) return;
  base::MutexLock lock(mutex_);
  released_.wait_for(lock, timeout);
}

void Arena::close() {
  if (::getpid() != owner_) return;
  const base::MutexLock lock(mutex_);
  for (Region& region : regions_) region.pages.reset();
}

int64_t Arena::mapped_bytes() {
  if (::getpid() != owner_) return 0;
  const base::MutexLock lock(mutex_);
  int64_t bytes = 0;
  for (const Region& region : regions_) bytes += region.pages == nullptr ? 0 : region.pages->bytes();
  return bytes;
}

std::vector<LeaseHolder> Arena::holders() {
  if (::getpid() != owner_) return {};
  const base::MutexLock lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  std::vector<LeaseHolder> holders;
  for (const Region& region : regions_) {
    if (!region.is_leased) continue;
    holders.push_back({region.bytes, std::chrono::duration<double>(now - region.since).count(), region.what});
  }
  return holders;
}

void Arena::release(size_t region) {
  const base::MutexLock lock(mutex_);
  regions_[region].is_leased = false;
  released_.notify_all();
}

void Lease::keep_checksums(StagedBytes staged) {
  const base::MutexLock lock(mutex_);
  if (is_released_) return;
  staged_ = std::make_shared<const StagedBytes>(std::move(staged));
  list_staged(staged_);
}

std::string Lease::encoded_checksums() {
  const base::MutexLock lock(mutex_);
  return encode_staged(staged_ == nullptr ? StagedBytes() : *staged_);
}

void Lease::release() {
  if (::getpid() != arena_->owner_) return;
  {
    const base::MutexLock lock(mutex_);
    if (std::exchange(is_released_, true)) return;
    staged_.reset();
  }
  arena_->release(region_);
}

}  // namespace bytecheckpoint::staging
