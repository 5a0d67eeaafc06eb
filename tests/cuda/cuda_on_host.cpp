// SPDX-License-Identifier: Apache-2.0
#include "tests/cuda/cuda_on_host.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "csrc/staging/pack_plan.h"

namespace bytecheckpoint::test::cuda_on_host {
namespace {

struct Operation {
  std::function<bool()> run;    // returns false if it must still wait
  bool only_waits_for = false;  // an event: to run it changes nothing
};

struct Stream {
  std::deque<Operation> operations;
  bool is_of_caller = false;
  bool is_captured = false;
};

struct Event {
  int64_t recorded = 0;
  int64_t reached = 0;
};

struct State {
  std::mt19937_64 random;
  int64_t device_bytes = 0;
  int64_t calls_until_failure = -1;
  bool has_unseen_error = false;  // what cudaGetLastError reports
  bool is_capturing = false;
  bool has_lost_capture = false;
  std::set<Stream*> streams;
  std::map<void*, size_t> device_blocks;
  Counts counts;
};

thread_local cudaStreamCaptureMode g_capture_mode = cudaStreamCaptureModeGlobal;

State& state() {
  static State state;
  return state;
}

/// Whether each kernel gathers, by the host address that stands for it. Filled before `main`.
std::map<const void*, bool>& kernels() {
  static std::map<const void*, bool> kernels;
  return kernels;
}

[[noreturn]] void end_process(const char* fault) {
  std::fprintf(stderr, "cuda_on_host: %s\n", fault);
  std::abort();
}

Stream& stream_of(cudaStream_t handle) {
  auto* const stream = reinterpret_cast<Stream*>(handle);
  if (state().streams.count(stream) == 0) end_process("a stream that is not there");
  return *stream;
}

Event& event_of(cudaEvent_t handle) {
  return *reinterpret_cast<Event*>(handle);
}

bool step_one() {
  std::vector<Stream*> order(state().streams.begin(), state().streams.end());
  std::shuffle(order.begin(), order.end(), state().random);
  for (Stream* stream : order) {
    if (stream->operations.empty() || !stream->operations.front().run()) continue;
    stream->operations.pop_front();
    return true;
  }
  return false;
}

void step_some() {
  for (auto n = state().random() % 4; n-- > 0;) step_one();
}

template <class Reached>
void step_until(const Reached& reached) {
  while (!reached()) {
    if (!step_one()) end_process("deadlock");
  }
}

void enqueue(cudaStream_t handle, std::function<void()> run) {
  stream_of(handle).operations.push_back({[run = std::move(run)] {
    run();
    return true;
  }});
}

/// Whether this call must fail.
bool fails() {
  int64_t& left = state().calls_until_failure;
  if (left < 0) return false;
  return left-- == 0;
}

/// Whether a call that is unsafe during captures must be refused.
bool breaks_capture() {
  if (!state().is_capturing || g_capture_mode == cudaStreamCaptureModeRelaxed) return false;
  state().has_lost_capture = true;
  return true;
}

void run_tile(const staging::PackedPiece* pieces, const staging::Tile& tile, uint8_t* scratch, bool gathers, int thread,
              int num_threads) {
  const staging::PackedPiece& piece = pieces[tile.piece];
  uint8_t* const packed = scratch + (piece.scratch_offset + tile.first_unit * piece.layout.unit_bytes);
  if (gathers) {
    staging::gather_tile(piece.layout, tile, packed, thread, num_threads);
  } else {
    staging::scatter_tile(piece.layout, tile, packed, thread, num_threads);
  }
}

cudaError_t launch(const void* kernel, dim3 grid, dim3 block, void** arguments, cudaStream_t stream) {
  if (fails()) {
    state().has_unseen_error = true;
    return cudaErrorUnknown;
  }
  ++state().counts.launches;
  const bool gathers = kernels().at(kernel);
  auto* const pieces = *static_cast<const staging::PackedPiece**>(arguments[0]);
  auto* const tiles = *static_cast<const staging::Tile**>(arguments[1]);
  auto* const scratch = *static_cast<uint8_t**>(arguments[2]);
  enqueue(stream, [=] {
    for (unsigned int t = 0; t < grid.x; ++t) {
      for (unsigned int thread = 0; thread < block.x; ++thread) {
        run_tile(pieces, tiles[t], scratch, gathers, static_cast<int>(thread), static_cast<int>(block.x));
      }
    }
  });
  return cudaSuccess;
}

CUresult get_context(CUcontext* context) {
  *context = nullptr;
  return CUDA_SUCCESS;
}

CUresult set_context(CUcontext) {
  return CUDA_SUCCESS;
}

cudaError_t find_driver_function(const char* name, void** function, cudaDriverEntryPointQueryResult* result) {
  *function = std::strstr(name, "Get") != nullptr ? reinterpret_cast<void*>(&get_context)
                                                  : reinterpret_cast<void*>(&set_context);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // namespace

struct CallerStream::Queue : Stream {};

void begin_round(uint64_t seed, int64_t device_bytes) {
  if (!state().streams.empty()) end_process("a stream of an earlier round is left");
  if (!state().device_blocks.empty()) end_process("memory of the device is left of an earlier round");
  state() = State();
  state().random.seed(seed);
  state().device_bytes = device_bytes;
}

void fail_after(int64_t calls) {
  state().calls_until_failure = calls;
}

void set_capturing(bool is_capturing) {
  state().is_capturing = is_capturing;
}

bool has_lost_capture() {
  return state().has_lost_capture;
}

CallerStream::CallerStream() : queue_(std::make_unique<Queue>()) {
  queue_->is_of_caller = true;
  state().streams.insert(queue_.get());
}

CallerStream::~CallerStream() {
  state().streams.erase(queue_.get());
}

uintptr_t CallerStream::handle() const {
  return reinterpret_cast<uintptr_t>(static_cast<Stream*>(queue_.get()));
}

void CallerStream::set_captured(bool is_captured) {
  queue_->is_captured = is_captured;
}

void CallerStream::enqueue(std::function<void()> run) {
  cuda_on_host::enqueue(reinterpret_cast<cudaStream_t>(handle()), std::move(run));
}

void CallerStream::synchronize() {
  step_until([&] { return queue_->operations.empty(); });
}

bool step() {
  return step_one();
}

int64_t num_enqueued() {
  size_t count = 0;
  for (const Stream* stream : state().streams) {
    if (stream->is_of_caller) continue;
    const std::deque<Operation>& operations = stream->operations;
    count +=
        static_cast<size_t>(operations.end() - std::find_if(operations.begin(), operations.end(), [](const auto& of) {
                              return !of.only_waits_for || !of.run();
                            }));
  }
  return static_cast<int64_t>(count);
}

Counts counts() {
  return state().counts;
}

// --- the runtime itself, under its own names

#define BCP_MAY_FAIL() \
  if (fails()) return cudaErrorUnknown
#define BCP_UNSAFE_IN_CAPTURE() \
  if (breaks_capture()) return cudaErrorStreamCaptureUnsupported

extern "C" {

// Functions that nvcc's host code calls before `main`, and around `<<<>>>`.

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) {
  return 0;
}
void __cudaRegisterFunction(void**, const char* on_host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  kernels()[on_host] = std::string(name).find("ILb1E") != std::string::npos;  // move_tiles<true>
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* on_host) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(on_host));
  return cudaSuccess;
}

namespace {
struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
} g_configuration;  // between the push and the pop of one launch
}  // namespace

unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  g_configuration = {grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = g_configuration.grid;
  *block = g_configuration.block;
  *shared_bytes = g_configuration.shared_bytes;
  *static_cast<void**>(stream) = g_configuration.stream;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t, cudaStream_t stream) {
  return launch(kernel, grid, block, arguments, stream);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t,
                               cudaStream_t stream) {
  return launch(static_cast<const void*>(kernel), grid, block, arguments, stream);
}

cudaError_t cudaGetLastError() {
  return std::exchange(state().has_unseen_error, false) ? cudaErrorUnknown : cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "of the stand-in";
}
const char* cudaGetErrorName(cudaError_t) {
  return "stand-in";
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned int) {
  BCP_MAY_FAIL();
  auto* const stream = new Stream();
  state().streams.insert(stream);
  ++state().counts.streams;
  *made = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  Stream& stream = stream_of(handle);
  if (!stream.operations.empty()) end_process("a busy stream is destroyed");
  state().streams.erase(&stream);
  --state().counts.streams;
  delete &stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  BCP_UNSAFE_IN_CAPTURE();
  if (handle == nullptr) return cudaSuccess;
  const Stream& stream = stream_of(handle);
  step_until([&] { return stream.operations.empty(); });
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t awaited, unsigned int) {
  BCP_MAY_FAIL();
  const Event* const event = &event_of(awaited);
  const int64_t wanted = event->recorded;
  if (wanted == 0) end_process("an event is waited for that was never recorded");
  stream_of(handle).operations.push_back({[=] { return event->reached >= wanted; }, true});
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned int) {
  BCP_MAY_FAIL();
  *made = reinterpret_cast<cudaEvent_t>(new Event());
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &event_of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t recorded, cudaStream_t stream) {
  BCP_MAY_FAIL();
  Event* const event = &event_of(recorded);
  const int64_t number = ++event->recorded;
  enqueue(stream, [=] { event->reached = std::max(event->reached, number); });
  step_some();
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t asked) {
  BCP_UNSAFE_IN_CAPTURE();
  BCP_MAY_FAIL();
  step_some();
  const Event& event = event_of(asked);
  return event.reached >= event.recorded ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t awaited) {
  BCP_UNSAFE_IN_CAPTURE();
  BCP_MAY_FAIL();
  const Event& event = event_of(awaited);
  step_until([&] { return event.reached >= event.recorded; });
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  BCP_UNSAFE_IN_CAPTURE();
  BCP_MAY_FAIL();
  if (static_cast<int64_t>(bytes) > state().device_bytes) {
    state().has_unseen_error = true;
    return cudaErrorMemoryAllocation;
  }
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(*memory, 0xC3, bytes);  // stale content, which must not get into a checkpoint
  state().device_bytes -= static_cast<int64_t>(bytes);
  state().device_blocks[*memory] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  BCP_UNSAFE_IN_CAPTURE();
  const auto block = state().device_blocks.find(memory);
  if (block == state().device_blocks.end()) end_process("memory is freed that the device did not give");
  state().device_bytes += static_cast<int64_t>(block->second);
  state().device_blocks.erase(block);
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** memory, size_t bytes) {
  BCP_UNSAFE_IN_CAPTURE();
  BCP_MAY_FAIL();
  ++state().counts.pinned_blocks;
  *memory = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  BCP_UNSAFE_IN_CAPTURE();
  --state().counts.pinned_blocks;
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void*, size_t, unsigned int) {
  BCP_UNSAFE_IN_CAPTURE();
  BCP_MAY_FAIL();
  ++state().counts.locked_regions;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void*) {
  BCP_UNSAFE_IN_CAPTURE();
  --state().counts.locked_regions;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  BCP_MAY_FAIL();
  ++state().counts.copies;
  enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  step_some();
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t row_bytes,
                              size_t num_rows, cudaMemcpyKind, cudaStream_t stream) {
  BCP_MAY_FAIL();
  if (row_bytes > to_pitch || row_bytes > from_pitch) return cudaErrorInvalidPitchValue;
  ++state().counts.copies;
  enqueue(stream, [=] {
    for (size_t row = 0; row < num_rows; ++row) {
      std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch,
                  row_bytes);
    }
  });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  BCP_MAY_FAIL();
  enqueue(stream, [=] { std::memset(memory, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, g_capture_mode);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  BCP_MAY_FAIL();
  *status = stream_of(stream).is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 2147483647;  // the largest pitch
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) {
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  return find_driver_function(name, function, result);
}
#else
cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long,
                                    cudaDriverEntryPointQueryResult* result) {
  return find_driver_function(name, function, result);
}
#endif

}  // extern "C"

}  // namespace bytecheckpoint::test::cuda_on_host
