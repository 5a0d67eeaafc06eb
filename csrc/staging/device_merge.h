// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/staging/device_piece.h"

namespace bytecheckpoint::staging {

/// Device memory that a DeviceMerge allocates. It has two halves: one is packed while the other is copied.
inline constexpr int64_t kDefaultScratchBytes = 64 << 20;
/// Larger contiguous pieces are copied by themselves. Smaller and strided ones are packed by a kernel.
inline constexpr int64_t kMaxPackedBytes = 1 << 20;
/// The largest gap between packed pieces that is copied along: about what the link moves in the time that another copy
/// takes to start.
inline constexpr int64_t kMaxGapBytes = 32 << 10;

/// Copies many strided tensors of one CUDA device to one host buffer, and back.
///
/// A kernel packs small and strided pieces, one batch at a time, into scratch memory on the device, in the layout of
/// the host buffer. Each stretch of neighbours then leaves in one DMA. Large contiguous pieces are copied by
/// themselves.
///
///     kernels stream   pack batch 0 -> half 0 | pack batch 1 -> half 1 | pack batch 2 -> half 0 | ...
///     copies stream    large pieces           | half 0 -> host         | half 1 -> host         | ...
///
/// Events order the two streams: behind the caller's stream, and against each other where both use a half. So the host
/// never waits, and a kernel packs one half while the link carries the other.
///
/// A transfer is begun, and identified by its number from then on. Any number of transfers may be under way; they end
/// in the order in which they were begun. Each batch holds a table in pinned host memory, under 1 MiB, until its
/// transfer is done. Tables are kept for later transfers.
///
/// If the device has too little memory left, scratch is smaller, or there is none: then strided pieces are copied row
/// by row.
///
/// Thread safety: any thread may call, but only one at a time. The calling thread's current device stays as it is. The
/// object belongs to the process that made it: in a forked child only the destructor may be called, and does nothing.
///
/// Errors of all calls: kUnsupported without device code, driver or device. kDevice for anything else that CUDA
/// refuses; an earlier and unrelated kernel may have caused it. kInvalidArgument.
class DeviceMerge {
 public:
  /// Whether this build has device code. If not, `create` returns kUnsupported.
  static bool is_built();
  /// Returns the architectures that it was compiled for, like "sm_80 sm_90 compute_90"; empty without device code.
  static const char* architectures();

  /// \param device         CUDA's number, as in `cuda:3`.
  /// \param scratch_bytes  The most device memory to allocate, tables apart. Below 2 MiB no kernels are used, as if the
  /// device had no memory left.
  static base::Result<std::unique_ptr<DeviceMerge>> create(int device, int64_t scratch_bytes = kDefaultScratchBytes);
  /// Waits until nothing is under way.
  ~DeviceMerge();
  DeviceMerge(const DeviceMerge&) = delete;
  DeviceMerge& operator=(const DeviceMerge&) = delete;

  /// Begins to copy all pieces to `host`, after all work that is on `caller_stream` so far. Returns before it is done.
  ///
  /// Until the transfer is done, `host` must not be touched. The pieces must not be written or freed, except by work on
  /// a stream that waits by `make_stream_wait`: torch's allocator does not know the streams that are used here.
  ///
  /// \param pieces  Ascending by host offset, not overlapping, all on this device. The transfer owns `host` from
  /// the first offset to the last end: bytes in gaps become 0 or stay, so write headers afterwards.
  /// \param host  Pinned (`pin_pages`). With other memory the call takes as long as the copy.
  /// \param caller_stream  A cudaStream_t of this device as an integer; 0 is the legacy default stream. It may not be
  /// under capture into a CUDA graph; other streams may, in any thread.
  /// \returns the number of the transfer. After an error nothing of it is under way.
  base::Result<int64_t> begin_gather(const std::vector<DevicePiece>& pieces, uint8_t* host, uintptr_t caller_stream);

  /// The reverse: begins to copy from `host` to all pieces. No two pieces may share memory, and none may be expanded.
  /// Bytes in gaps are read, but not used.
  base::Result<int64_t> begin_scatter(const std::vector<DevicePiece>& pieces, const uint8_t* host,
                                      uintptr_t caller_stream);

  /// Makes all work that is enqueued on `stream` from now on wait for all transfers begun so far. The host does not
  /// wait. Call it for a stream that uses scattered tensors, or that overwrites or frees gathered ones.
  base::Status make_stream_wait(uintptr_t stream);

  /// Whether a transfer is done, and so all that were begun before it. If it failed, this and `wait` return an error,
  /// also for all transfers behind it.
  base::Result<bool> is_done(int64_t transfer);
  /// Blocks until a transfer is done.
  base::Status wait(int64_t transfer);

  /// Page-locks host memory for all devices, so that copies to and from it do not block. Unpin it before it is
  /// unmapped. Thread-safe. \param device  Any device that works.
  static base::Status pin_pages(int device, void* first, int64_t bytes);
  static base::Status unpin_pages(int device, void* first);

  int device() const;
  /// The device memory that `create` got; 0 if no kernel is used.
  int64_t scratch_bytes() const;

 private:
  class Impl;
  explicit DeviceMerge(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace bytecheckpoint::staging
