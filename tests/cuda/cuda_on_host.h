// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

/// Replaces a CUDA device: the part of the CUDA runtime that `cuda_device_merge.cu` calls, in host memory, linked
/// instead of the real runtime.
///
/// A stream is a queue of operations. None runs when it is enqueued. Whenever the host calls the runtime, or waits,
/// some operations of randomly chosen streams run, as far as events allow. So a missing event shows as wrong bytes in
/// some order, and a wait for an event that never comes shows as a deadlock. Kernels run on the host, from the same
/// lines that device code is compiled from. Properties of a real device, such as speed and alignment, are not tested.
///
/// Calls that no correct caller makes (a deadlock, destroying a busy stream, waiting for an event that was never
/// recorded) end the process with a message. One thread at a time.
namespace bytecheckpoint::test::cuda_on_host {

/// Starts a new round. Nothing of an earlier round may be left. \param device_bytes  Memory that cudaMalloc can still
/// give.
void begin_round(uint64_t seed, int64_t device_bytes);

/// Makes one call of the runtime fail, after the next `calls` calls. A negative number lets none fail.
void fail_after(int64_t calls);

/// Whether a thread captures a graph in the mode that CUDA takes by default. Then the runtime refuses, in threads that
/// are not in relaxed mode, the calls that it calls unsafe, and the capture is lost.
void set_capturing(bool is_capturing);
/// Whether such a call has come since the round began.
bool has_lost_capture();

/// A stream of the caller.
class CallerStream {
 public:
  CallerStream();
  ~CallerStream();
  CallerStream(const CallerStream&) = delete;
  CallerStream& operator=(const CallerStream&) = delete;

  uintptr_t handle() const;
  /// Whether it is being captured into a graph.
  void set_captured(bool is_captured);
  void enqueue(std::function<void()> run);
  /// Runs streams until this one is empty.
  void synchronize();

 private:
  struct Queue;
  std::unique_ptr<Queue> queue_;
};

/// Runs one operation of some stream. Returns false if none can run.
bool step();
/// Number of operations in streams of the runtime's caller, except CallerStreams. Waits for what has come do not count.
int64_t num_enqueued();

struct Counts {
  int64_t launches = 0;
  int64_t copies = 0;
  int64_t streams = 0;         // existing ones of the runtime's caller
  int64_t pinned_blocks = 0;   // currently allocated by cudaMallocHost
  int64_t locked_regions = 0;  // currently registered by cudaHostRegister
};
Counts counts();

}  // namespace bytecheckpoint::test::cuda_on_host
