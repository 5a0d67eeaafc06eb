// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/staging/device_piece.h"

namespace bytecheckpoint::staging {

/// Device memory that a DeviceMerge takes, in two halves: one is packed while the other is copied.
inline constexpr int64_t kDefaultScratchBytes = 64 << 20;
/// Contiguous pieces above this are copied by themselves; what is smaller, or strided, is packed by a kernel.
inline constexpr int64_t kMaxPackedBytes = 1 << 20;
/// Largest gap between packed pieces that is copied along: about what the link moves in the time that starting another
/// copy takes.
inline constexpr int64_t kMaxGapBytes = 32 << 10;

/// Copies many strided tensors of one CUDA device to one host buffer, and back.
///
/// Small and strided pieces are packed by one kernel a batch, into scratch that lies as the host buffer does, and leave
/// in one DMA for each stretch of neighbours. Large contiguous ones go by themselves. Everything runs on two streams of
/// its own, one for kernels and one for copies. Events order them: behind the caller's stream, and against each other
/// where both use a half of scratch. So scratch is used again without the host ever waiting, and a kernel packs one
/// half while the link carries the other.
///
/// A transfer is begun, and then known by its number. Transfers end in the order in which they were begun; any number
/// may be under way. Each batch of one holds a table in pinned host memory, under 1 MiB, until the transfer is done;
/// tables are kept for the next.
///
/// If the device has no memory left for scratch, there is less of it, or none: then strided pieces go row by row.
///
/// Calls may come from any thread, one at a time. The device that is current in the calling thread stays so. Belongs to
/// the process that made it: in a forked child only the destructor may be called, and does nothing.
///
/// Errors: kUnsupported without device code, driver or device; kDevice for whatever else CUDA refuses, which as CUDA
/// has it may be the fault of an earlier, unrelated kernel; kInvalidArgument.
class DeviceMerge {
 public:
  /// Is there device code in this build? If not, `create` returns kUnsupported.
  static bool is_built();
  /// What it was compiled for, like "sm_80 sm_90 compute_90"; empty if there is none.
  static const char* architectures();

  /// \param device         CUDA's number, as in `cuda:3`.
  /// \param scratch_bytes  At most so much memory of the device, tables apart. Below 2 MiB there are no kernels, as
  ///                       if it had none left.
  static base::Result<std::unique_ptr<DeviceMerge>> create(int device, int64_t scratch_bytes = kDefaultScratchBytes);
  /// Waits for what is under way.
  ~DeviceMerge();
  DeviceMerge(const DeviceMerge&) = delete;
  DeviceMerge& operator=(const DeviceMerge&) = delete;

  /// Begins to copy all pieces to `host`, behind everything that was enqueued on `caller_stream` so far.
  ///
  /// Until the transfer is done, the pieces must not be written or freed, but by what a stream does behind
  /// `make_stream_wait`; to torch's allocator this is a foreign stream. `host` must not be touched.
  ///
  /// \param pieces  Ascending by host offset, apart, of this device. `host` is the transfer's from the first
  ///                offset to the last end: bytes in gaps become 0 or stay as they were. Headers are written
  ///                afterwards.
  /// \param host    Pinned (`pin_pages`); with other memory the call takes as long as the copy.
  /// \param caller_stream  A cudaStream_t of this device as an integer; 0 is the legacy default stream.
  /// \returns the number of the transfer. After an error nothing of it is under way.
  base::Result<int64_t> begin_gather(const std::vector<DevicePiece>& pieces, uint8_t* host, uintptr_t caller_stream);

  /// The reverse: begins to copy from `host` to all pieces, of which no two share memory and none is expanded. Bytes in
  /// gaps are read and not used.
  base::Result<int64_t> begin_scatter(const std::vector<DevicePiece>& pieces, const uint8_t* host,
                                      uintptr_t caller_stream);

  /// Makes what is enqueued on `stream` from now on wait for all transfers begun so far; the host does not wait. This
  /// is what a stream needs that uses scattered tensors, or that overwrites or frees gathered ones.
  base::Status make_stream_wait(uintptr_t stream);

  /// Is a transfer done, and with it all begun before? A failed one is an error, here and in `wait`, and so are all
  /// behind it.
  base::Result<bool> is_done(int64_t transfer);
  base::Status wait(int64_t transfer);

  /// Page-locks host memory for all devices, so that copies to and from it do not block. It must be unpinned before it
  /// is unmapped. Any thread, at any time. \param device  Any.
  static base::Status pin_pages(int device, void* first, int64_t bytes);
  static base::Status unpin_pages(int device, void* first);

  int device() const;
  /// What `create` got; 0 if all pieces go without a kernel.
  int64_t scratch_bytes() const;

 private:
  class Impl;
  explicit DeviceMerge(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace bytecheckpoint::staging
