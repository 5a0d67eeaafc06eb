// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "csrc/base/status.h"
#include "csrc/staging/load_targets.h"
#include "csrc/staging/pages.h"
#include "csrc/staging/shared_device_merge.h"

namespace bytecheckpoint::staging {

inline constexpr int64_t kSlotBytes = 8 << 20;  // one write or read of the pipelines
/// Slots to write that a conversion fills by one run of reads, so that the disk finds several requests at a time.
inline constexpr int kSlotsARun = 2;
/// Enough slots to write one while another is filled. More of them take cache from everybody else: beside a ring of 64
/// MiB a training loop lost twice as much speed as beside 24 MiB, and the save took longer.
inline constexpr int64_t kDefaultRingBytes = 3 * kSlotBytes;
/// The most that a ring may take, which is the memory that a save or a load adds to the process.
inline constexpr int64_t kMaxRingBytes = 256 << 20;

/// Host memory, divided into slots:
///
///     |     slot 0      |     slot 1      |     slot 2      |     8 MiB each, 24 MiB by default
///
/// Who may use which slot is the owner's business: `SaveJob` and `ReadPipeline` hand slot numbers through queues.
class SlotRing {
 public:
  /// \returns kStorage if the memory cannot be mapped.
  static base::Result<std::unique_ptr<SlotRing>> map(int num_slots);
  /// Maps a ring that other processes can map (see `PeerRing`). \param ring_bytes  As for `BorrowedRing::borrow`.
  /// \returns kStorage.
  static base::Result<std::unique_ptr<SlotRing>> map_shareable(int64_t ring_bytes);

  /// Begins to touch the pages of the first `num_slots` slots in the background, and returns. The slots may be used
  /// meanwhile. Not thread-safe.
  void populate(int num_slots) { pages_->populate(num_slots * kSlotBytes); }
  /// Page-locks the slots, so that devices copy to and from them at full speed: see `pin_pages`. If they cannot be
  /// locked, copies are slower, and as exact. From then on the ring is absent in forked children.
  /// \param device  Any device in use; no effect for kHost.
  void pin(int device) {
    if (device != kHost) static_cast<void>(pin_pages(device, pages_->bytes(), pages_.get()));
  }
  /// Whether this process has the memory.
  bool is_here() const { return pages_->is_here(); }

  uint8_t* slot(int index) const { return pages_->first() + index * kSlotBytes; }
  int num_slots() const { return static_cast<int>(pages_->bytes() / kSlotBytes); }
  /// Descriptor of the memory if another process can map it; else -1.
  int fd() const { return pages_->fd(); }

 private:
  explicit SlotRing(std::unique_ptr<Pages> pages) : pages_(std::move(pages)) {}
  std::unique_ptr<Pages> pages_;
};

/// A ring that is borrowed from the process, and goes back when this is destroyed. One ring stays mapped between saves,
/// because touching fresh memory costs more than copying through warm memory. A second borrower at the same time gets a
/// ring of its own. `borrow` is thread-safe.
class BorrowedRing {
 public:
  /// \param ring_bytes  Rounded up to whole slots; at least two slots, at most kMaxRingBytes. \returns kStorage.
  static base::Result<BorrowedRing> borrow(int64_t ring_bytes);
  BorrowedRing(BorrowedRing&&) = default;
  BorrowedRing& operator=(BorrowedRing&&) = default;
  ~BorrowedRing();

  /// Begins to touch a ring of `ring_bytes` for a transfer of `expected_bytes` that will borrow it soon. Returns at
  /// once.
  static base::Status prepare(int64_t ring_bytes, int64_t expected_bytes);
  /// Frees the ring that waits for its next borrower, if there is one.
  static void free_idle();
  /// Returns the ring, which goes back when the last copy of the result is destroyed.
  static std::shared_ptr<SlotRing> shared(BorrowedRing borrowed);

  SlotRing& operator*() const { return *ring_; }
  SlotRing* operator->() const { return ring_.get(); }

 private:
  explicit BorrowedRing(std::unique_ptr<SlotRing> ring) : ring_(std::move(ring)) {}
  std::unique_ptr<SlotRing> ring_;
};

}  // namespace bytecheckpoint::staging
