// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

/// Stands in for a CUDA device that is not there: as much of the CUDA runtime as `cuda_device_merge.cu` calls, in host
/// memory, linked in the place of the real one.
///
/// A stream is a queue of operations. None runs when it is enqueued: whenever the host calls the runtime, or waits,
/// some run, of streams that are drawn, as far as events allow. So an event that is missing shows as wrong bytes in one
/// order or another, one that is waited for in vain as a deadlock. Kernels run the lines that device code is compiled
/// from, on the host. What only a device can show, speed and alignment among it, does not show here.
///
/// What no correct caller does (a deadlock, a busy stream that is destroyed, an event that was never recorded) ends the
/// process with a message. One thread at a time.
namespace bytecheckpoint::test::cuda_on_host {

/// Begins anew; nothing of an earlier round may be left. \param device_bytes  That cudaMalloc can still give.
void begin_round(uint64_t seed, int64_t device_bytes);

/// Lets one call of the runtime fail, the one behind the next `calls`; a negative number lets none fail.
void fail_after(int64_t calls);

/// A stream of the caller's.
class CallerStream {
 public:
  CallerStream();
  ~CallerStream();
  CallerStream(const CallerStream&) = delete;
  CallerStream& operator=(const CallerStream&) = delete;

  uintptr_t handle() const;
  void enqueue(std::function<void()> run);
  /// Runs streams until this one is empty.
  void synchronize();

 private:
  struct Queue;
  friend class Runtime;
  std::unique_ptr<Queue> queue_;
};

/// Runs one operation of some stream; false if none can.
bool step();
/// Operations that wait in streams of the runtime's caller, those of CallerStreams apart.
int64_t num_enqueued();

struct Counts {
  int64_t launches = 0;
  int64_t copies = 0;
  int64_t streams = 0;         // that exist, of the runtime's caller
  int64_t pinned_blocks = 0;   // of cudaMallocHost, now
  int64_t locked_regions = 0;  // of cudaHostRegister, now
};
Counts counts();

}  // namespace bytecheckpoint::test::cuda_on_host
