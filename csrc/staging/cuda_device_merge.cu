// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/staging/copy_rects.h"
#include "csrc/staging/cuda_device_scope.h"
#include "csrc/staging/cuda_handles.h"
#include "csrc/staging/device_merge.h"
#include "csrc/staging/pack_plan.h"

namespace bytecheckpoint::staging {
namespace {

using base::Code;
using base::Result;
using base::Status;
using base::text;

constexpr int kThreads = 256;
// A smaller half of scratch is not worth a kernel.
constexpr int64_t kMinHalfBytes = 1 << 20;

/// Moves one tile with each block of threads. A kernel only has to be so much faster than the link that the link hides
/// it. It is several times faster even with units of two bytes, so nothing is staged through shared memory.
template <bool kGather>
__global__ void __launch_bounds__(kThreads) move_tiles(const PackedPiece* pieces, const Tile* tiles, uint8_t* scratch) {
  const Tile tile = tiles[blockIdx.x];
  const PackedPiece& piece = pieces[tile.piece];
  uint8_t* packed = scratch + (piece.scratch_offset + tile.first_unit * piece.layout.unit_bytes);
  if (kGather) {
    gather_tile(piece.layout, tile, packed, threadIdx.x, kThreads);
  } else {
    scatter_tile(piece.layout, tile, packed, threadIdx.x, kThreads);
  }
}

}  // namespace

class DeviceMerge::Impl {
 public:
  explicit Impl(int device) : device_(device) {}

  Status open(int64_t scratch_bytes);
  /// Waits for both streams. The device must be current.
  void close() {
    static_cast<void>(cudaStreamSynchronize(kernels_.get()));
    static_cast<void>(cudaStreamSynchronize(copies_.get()));
  }

  /// Begins a transfer. Exactly one of `to_host` and `from_host` is not null: the host buffer.
  Result<int64_t> begin(const std::vector<DevicePiece>& pieces, uint8_t* to_host, const uint8_t* from_host,
                        uintptr_t caller_stream);
  Status make_stream_wait(cudaStream_t stream);
  Result<bool> is_done(int64_t transfer);
  Status wait(int64_t transfer);

  int device() const { return device_; }
  int64_t scratch_bytes() const { return 2 * limits_.scratch_bytes; }
  bool is_of_this_process() const { return owner_ == getpid(); }

 private:
  struct Transfer {
    int64_t number = 0;
    Event done;
    std::vector<PinnedMemory> tables;  // one for each batch; DMA reads them until the transfer is done
  };

  Status take_scratch(int64_t scratch_bytes);
  Status enqueue(const std::vector<DevicePiece>& pieces, uint8_t* to_host, const uint8_t* from_host,
                 cudaStream_t caller, Transfer* transfer);
  Status gather_batch(const std::vector<DevicePiece>& pieces, uint8_t* host, Transfer* transfer);
  Status scatter_batch(const std::vector<DevicePiece>& pieces, const uint8_t* host, Transfer* transfer);
  Status upload_tables(Transfer* transfer);
  template <bool kGather>
  Status launch();
  Status copy_directly(const DevicePiece& piece, uint8_t* to_host, const uint8_t* from_host);
  Status check_number(int64_t transfer) const;
  void take_back_first();

  uint8_t* half_at_hand() const { return scratch_.get() + half_ * limits_.scratch_bytes; }
  uint8_t* device_tables() const { return scratch_.get() + 2 * limits_.scratch_bytes; }
  int64_t pieces_bytes() const { return limits_.max_pieces * static_cast<int64_t>(sizeof(PackedPiece)); }
  int64_t table_bytes() const { return pieces_bytes() + limits_.max_tiles() * static_cast<int64_t>(sizeof(Tile)); }

  const int device_;
  const pid_t owner_ = getpid();
  int64_t max_pitch_bytes_ = 0;
  PackLimits limits_;  // scratch_bytes is that of one half

  Stream kernels_, copies_;
  Event begun_;      // recorded on the caller's stream
  Event joined_;     // joins the two streams at the end of a scatter
  Event filled_[2];  // of each half: whoever empties it waits for this
  Event free_[2];    // of each half: whoever fills it waits for this
  // Both halves and one table. Only the kernels stream writes and reads the table, so in turn.
  DeviceMemory scratch_;
  int half_ = 0;  // the half that the next batch uses

  PackBatch batch_;  // the current batch
  std::deque<Transfer> under_way_;
  int64_t last_number_ = 0;
  std::vector<Event> spare_events_;
  std::vector<PinnedMemory> spare_tables_;
};

Status DeviceMerge::Impl::open(int64_t scratch_bytes) {
  int max_pitch_bytes = 0;
  BCP_RETURN_IF_ERROR(
      check_cuda("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&max_pitch_bytes, cudaDevAttrMaxPitch, device_)));
  max_pitch_bytes_ = max_pitch_bytes;
  // Fails now if there is no code for this device.
  cudaFuncAttributes attributes;
  BCP_RETURN_IF_ERROR(check_cuda(text("device code (", architectures(), ") for device ", device_),
                                 cudaFuncGetAttributes(&attributes, move_tiles<true>)));
  BCP_RETURN_IF_ERROR(make_stream(&kernels_));
  BCP_RETURN_IF_ERROR(make_stream(&copies_));
  for (Event* event : {&begun_, &joined_, &filled_[0], &filled_[1], &free_[0], &free_[1]}) {
    BCP_RETURN_IF_ERROR(make_event(event));
  }
  for (const Event& event : free_) BCP_RETURN_IF_ERROR(record(event, copies_.get()));
  return take_scratch(scratch_bytes);
}

Status DeviceMerge::Impl::take_scratch(int64_t scratch_bytes) {
  limits_.max_packed_bytes = kMaxPackedBytes;
  limits_.max_gap_bytes = kMaxGapBytes;
  for (int64_t half_bytes = base::align_down(scratch_bytes / 2, 4096); half_bytes >= kMinHalfBytes;
       half_bytes = base::align_down(half_bytes / 2, 4096)) {
    limits_.scratch_bytes = half_bytes;
    limits_.max_pieces = half_bytes / 8192;
    uint8_t* memory = nullptr;
    const cudaError_t error =
        cudaMalloc(reinterpret_cast<void**>(&memory), static_cast<size_t>(2 * half_bytes + table_bytes()));
    if (error == cudaSuccess) {
      scratch_.reset(memory);
      return Status::ok();
    }
    // Training may hold all but a few MiB of the device. That must not cost it its checkpoint.
    const Status status = check_cuda(text("cudaMalloc(", 2 * half_bytes + table_bytes(), " bytes)"), error);
    if (error != cudaErrorMemoryAllocation) return status;
  }
  limits_.scratch_bytes = 0;
  return Status::ok();
}

Result<int64_t> DeviceMerge::Impl::begin(const std::vector<DevicePiece>& pieces, uint8_t* to_host,
                                         const uint8_t* from_host, uintptr_t caller_stream) {
  BCP_RETURN_IF_ERROR(check_pieces(pieces));
  if (to_host == nullptr && from_host == nullptr) {
    return Status::make(Code::kInvalidArgument, "a device transfer without a host buffer");
  }
  const auto caller = reinterpret_cast<cudaStream_t>(caller_stream);
  auto capture = cudaStreamCaptureStatusNone;
  BCP_RETURN_IF_ERROR(check_cuda("device transfer: cudaStreamIsCapturing", cudaStreamIsCapturing(caller, &capture)));
  if (capture != cudaStreamCaptureStatusNone) {
    return Status::make(
        Code::kInvalidArgument,
        "a device transfer inside the capture of a CUDA graph: the current stream is being captured, so "
        "nothing on it runs yet; begin it before or after the capture");
  }
  BCP_RETURN_IF_ERROR(is_done(last_number_).status());  // also takes back events and tables of ended transfers
  Transfer transfer;
  transfer.number = last_number_ + 1;
  const Status status = enqueue(pieces, to_host, from_host, caller, &transfer);
  if (!status.is_ok()) {
    close();  // what was enqueued may not go on in memory that the caller takes back
    return status;
  }
  under_way_.push_back(std::move(transfer));
  return ++last_number_;
}

Status DeviceMerge::Impl::enqueue(const std::vector<DevicePiece>& pieces, uint8_t* to_host, const uint8_t* from_host,
                                  cudaStream_t caller, Transfer* transfer) {
  if (spare_events_.empty()) {
    BCP_RETURN_IF_ERROR(make_event(&transfer->done));
  } else {
    transfer->done = std::move(spare_events_.back());
    spare_events_.pop_back();
  }
  BCP_RETURN_IF_ERROR(record(begun_, caller).with_context("on the caller's stream"));
  BCP_RETURN_IF_ERROR(wait_for(begun_, kernels_.get()));
  BCP_RETURN_IF_ERROR(wait_for(begun_, copies_.get()));
  PackPlan plan(pieces, limits_);
  if (to_host != nullptr) {
    while (plan.next(&batch_)) BCP_RETURN_IF_ERROR(gather_batch(pieces, to_host, transfer));
    return record(transfer->done, copies_.get());  // this stream has waited for every kernel
  }
  while (plan.next(&batch_)) BCP_RETURN_IF_ERROR(scatter_batch(pieces, from_host, transfer));
  // Kernels end last, but copies of large pieces may still run. So the kernels stream waits for the copies stream. The
  // other way round, the copies of the next transfer would wait for the last kernel of this one.
  BCP_RETURN_IF_ERROR(record(joined_, copies_.get()));
  BCP_RETURN_IF_ERROR(wait_for(joined_, kernels_.get()));
  return record(transfer->done, kernels_.get());
}

Status DeviceMerge::Impl::gather_batch(const std::vector<DevicePiece>& pieces, uint8_t* host, Transfer* transfer) {
  const bool has_kernel = !batch_.tiles.empty();
  if (has_kernel) {
    BCP_RETURN_IF_ERROR(upload_tables(transfer));
    BCP_RETURN_IF_ERROR(wait_for(free_[half_], kernels_.get()));
    // Otherwise bytes of an earlier batch would get into the checkpoint.
    if (batch_.has_gaps) {
      BCP_RETURN_IF_ERROR(
          check_cuda("cudaMemsetAsync",
                     cudaMemsetAsync(half_at_hand(), 0, static_cast<size_t>(batch_.scratch_bytes), kernels_.get())));
    }
    BCP_RETURN_IF_ERROR(launch<true>());
    BCP_RETURN_IF_ERROR(record(filled_[half_], kernels_.get()));
  }
  // Before the copies that wait for the kernel, so that the link has work meanwhile.
  for (const size_t piece : batch_.direct) BCP_RETURN_IF_ERROR(copy_directly(pieces[piece], host, nullptr));
  if (!has_kernel) return Status::ok();
  BCP_RETURN_IF_ERROR(wait_for(filled_[half_], copies_.get()));
  for (const PackedRange& range : batch_.ranges) {
    BCP_RETURN_IF_ERROR(
        check_cuda(text("cudaMemcpyAsync(", range.bytes, " packed bytes to the host)"),
                   cudaMemcpyAsync(host + range.host_offset, half_at_hand() + range.scratch_offset,
                                   static_cast<size_t>(range.bytes), cudaMemcpyDeviceToHost, copies_.get())));
  }
  BCP_RETURN_IF_ERROR(record(free_[half_], copies_.get()));
  half_ = 1 - half_;
  return Status::ok();
}

Status DeviceMerge::Impl::scatter_batch(const std::vector<DevicePiece>& pieces, const uint8_t* host,
                                        Transfer* transfer) {
  const bool has_kernel = !batch_.tiles.empty();
  if (has_kernel) {
    BCP_RETURN_IF_ERROR(upload_tables(transfer));
    BCP_RETURN_IF_ERROR(wait_for(free_[half_], copies_.get()));
    for (const PackedRange& range : batch_.ranges) {
      BCP_RETURN_IF_ERROR(
          check_cuda(text("cudaMemcpyAsync(", range.bytes, " packed bytes to the device)"),
                     cudaMemcpyAsync(half_at_hand() + range.scratch_offset, host + range.host_offset,
                                     static_cast<size_t>(range.bytes), cudaMemcpyHostToDevice, copies_.get())));
    }
    BCP_RETURN_IF_ERROR(record(filled_[half_], copies_.get()));
    BCP_RETURN_IF_ERROR(wait_for(filled_[half_], kernels_.get()));
    BCP_RETURN_IF_ERROR(launch<false>());
    BCP_RETURN_IF_ERROR(record(free_[half_], kernels_.get()));
    half_ = 1 - half_;
  }
  for (const size_t piece : batch_.direct) BCP_RETURN_IF_ERROR(copy_directly(pieces[piece], nullptr, host));
  return Status::ok();
}

Status DeviceMerge::Impl::upload_tables(Transfer* transfer) {
  if (spare_tables_.empty()) {
    uint8_t* memory = nullptr;
    BCP_RETURN_IF_ERROR(
        check_cuda(text("cudaMallocHost(", table_bytes(), " bytes)"),
                   cudaMallocHost(reinterpret_cast<void**>(&memory), static_cast<size_t>(table_bytes()))));
    spare_tables_.emplace_back(memory);
  }
  transfer->tables.push_back(std::move(spare_tables_.back()));
  spare_tables_.pop_back();
  uint8_t* table = transfer->tables.back().get();
  const size_t of_pieces = batch_.pieces.size() * sizeof(PackedPiece);
  const size_t of_tiles = batch_.tiles.size() * sizeof(Tile);
  std::memcpy(table, batch_.pieces.data(), of_pieces);
  std::memcpy(table + of_pieces, batch_.tiles.data(), of_tiles);
  return check_cuda(
      "cudaMemcpyAsync(tables of pieces and tiles to the device)",
      cudaMemcpyAsync(device_tables(), table, of_pieces + of_tiles, cudaMemcpyHostToDevice, kernels_.get()));
}

template <bool kGather>
Status DeviceMerge::Impl::launch() {
  static_assert(sizeof(PackedPiece) % alignof(Tile) == 0, "tiles stand right behind the pieces");
  const auto* pieces = reinterpret_cast<const PackedPiece*>(device_tables());
  const auto* tiles = reinterpret_cast<const Tile*>(device_tables() + batch_.pieces.size() * sizeof(PackedPiece));
  move_tiles<kGather>
      <<<static_cast<unsigned int>(batch_.tiles.size()), kThreads, 0, kernels_.get()>>>(pieces, tiles, half_at_hand());
  return check_cuda(text("launch of ", batch_.tiles.size(), " tiles"), cudaGetLastError());
}

Status DeviceMerge::Impl::copy_directly(const DevicePiece& piece, uint8_t* to_host, const uint8_t* from_host) {
  const CopyRects rects(piece.view, max_pitch_bytes_);
  const bool gathers = to_host != nullptr;
  const cudaMemcpyKind kind = gathers ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
  for (int64_t i = 0; i < rects.num_rects(); ++i) {
    const CopyRect rect = rects.rect(i);
    const int64_t at = piece.host_offset + rect.packed_offset;
    uint8_t* memory = piece.view.data + rect.memory_offset;
    void* to = gathers ? to_host + at : memory;
    const void* from = gathers ? memory : from_host + at;
    const auto row_bytes = static_cast<size_t>(rect.row_bytes);
    const auto pitch_bytes = static_cast<size_t>(rect.pitch_bytes);
    if (rect.num_rows == 1) {
      BCP_RETURN_IF_ERROR(check_cuda(text("cudaMemcpyAsync(", rect.row_bytes, " bytes)"),
                                     cudaMemcpyAsync(to, from, row_bytes, kind, copies_.get())));
    } else {
      BCP_RETURN_IF_ERROR(
          check_cuda(text("cudaMemcpy2DAsync(", rect.num_rows, " rows of ", rect.row_bytes, " bytes)"),
                     cudaMemcpy2DAsync(to, gathers ? row_bytes : pitch_bytes, from, gathers ? pitch_bytes : row_bytes,
                                       row_bytes, static_cast<size_t>(rect.num_rows), kind, copies_.get())));
    }
  }
  return Status::ok();
}

Status DeviceMerge::Impl::make_stream_wait(cudaStream_t stream) {
  for (const Transfer& transfer : under_way_) BCP_RETURN_IF_ERROR(wait_for(transfer.done, stream));
  return Status::ok();
}

Status DeviceMerge::Impl::check_number(int64_t transfer) const {
  if (transfer >= 0 && transfer <= last_number_) return Status::ok();
  return Status::make(Code::kInvalidArgument,
                      text("device transfer ", transfer, ": the last one begun is ", last_number_));
}

Result<bool> DeviceMerge::Impl::is_done(int64_t transfer) {
  BCP_RETURN_IF_ERROR(check_number(transfer));
  while (!under_way_.empty() && under_way_.front().number <= transfer) {
    const cudaError_t error = cudaEventQuery(under_way_.front().done.get());
    if (error == cudaErrorNotReady) {
      cudaGetLastError();  // no error, but the next check of a launch would find it
      return false;
    }
    const Status status = check_cuda(text("device transfer ", under_way_.front().number), error);
    if (!status.is_ok()) {
      close();  // whoever hears of the error takes the memory back
      return status;
    }
    take_back_first();
  }
  return true;
}

Status DeviceMerge::Impl::wait(int64_t transfer) {
  BCP_RETURN_IF_ERROR(check_number(transfer));
  while (!under_way_.empty() && under_way_.front().number <= transfer) {
    BCP_RETURN_IF_ERROR(check_cuda(text("device transfer ", under_way_.front().number),
                                   cudaEventSynchronize(under_way_.front().done.get())));
    take_back_first();
  }
  return Status::ok();
}

void DeviceMerge::Impl::take_back_first() {
  Transfer& first = under_way_.front();
  spare_events_.push_back(std::move(first.done));
  for (PinnedMemory& table : first.tables) spare_tables_.push_back(std::move(table));
  under_way_.pop_front();
}

bool DeviceMerge::is_built() {
  return true;
}

const char* DeviceMerge::architectures() {
  return BCP_CUDA_ARCHITECTURES;
}

Result<std::unique_ptr<DeviceMerge>> DeviceMerge::create(int device, int64_t scratch_bytes) {
  if (scratch_bytes < 0) {
    return Status::make(Code::kInvalidArgument, text("scratch of ", scratch_bytes, " bytes"));
  }
  const DeviceScope scope(device);
  BCP_RETURN_IF_ERROR(scope.status());
  auto impl = std::make_unique<Impl>(device);
  BCP_RETURN_IF_ERROR(impl->open(scratch_bytes));
  return std::unique_ptr<DeviceMerge>(new DeviceMerge(std::move(impl)));
}

DeviceMerge::DeviceMerge(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

DeviceMerge::~DeviceMerge() {
  if (!impl_->is_of_this_process()) {
    static_cast<void>(impl_.release());  // CUDA does not work in a forked child; the handles are the parent's
    return;
  }
  const DeviceScope scope(impl_->device());
  impl_->close();
  impl_.reset();
}

Result<int64_t> DeviceMerge::begin_gather(const std::vector<DevicePiece>& pieces, uint8_t* host,
                                          uintptr_t caller_stream) {
  const DeviceScope scope(device());
  BCP_RETURN_IF_ERROR(scope.status());
  return impl_->begin(pieces, host, nullptr, caller_stream);
}

Result<int64_t> DeviceMerge::begin_scatter(const std::vector<DevicePiece>& pieces, const uint8_t* host,
                                           uintptr_t caller_stream) {
  const DeviceScope scope(device());
  BCP_RETURN_IF_ERROR(scope.status());
  return impl_->begin(pieces, nullptr, host, caller_stream);
}

Status DeviceMerge::make_stream_wait(uintptr_t stream) {
  const DeviceScope scope(device());
  BCP_RETURN_IF_ERROR(scope.status());
  return impl_->make_stream_wait(reinterpret_cast<cudaStream_t>(stream));
}

Result<bool> DeviceMerge::is_done(int64_t transfer) {
  const DeviceScope scope(device());
  BCP_RETURN_IF_ERROR(scope.status());
  return impl_->is_done(transfer);
}

Status DeviceMerge::wait(int64_t transfer) {
  const DeviceScope scope(device());
  BCP_RETURN_IF_ERROR(scope.status());
  return impl_->wait(transfer);
}

Status DeviceMerge::pin_pages(int device, void* first, int64_t bytes) {
  const DeviceScope scope(device);
  BCP_RETURN_IF_ERROR(scope.status());
  return check_cuda(text("cudaHostRegister(", bytes, " bytes)"),
                    cudaHostRegister(first, static_cast<size_t>(bytes), cudaHostRegisterPortable));
}

Status DeviceMerge::unpin_pages(int device, void* first) {
  const DeviceScope scope(device);
  BCP_RETURN_IF_ERROR(scope.status());
  return check_cuda("cudaHostUnregister", cudaHostUnregister(first));
}

int DeviceMerge::device() const {
  return impl_->device();
}

int64_t DeviceMerge::scratch_bytes() const {
  return impl_->scratch_bytes();
}

}  // namespace bytecheckpoint::staging
