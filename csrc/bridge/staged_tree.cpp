// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/staged_tree.h"

#include <chrono>
#include <optional>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/bridge/drop.h"
#include "csrc/bridge/errors.h"
#include "csrc/bridge/python_calls.h"
#include "csrc/bridge/state_values.h"
#include "csrc/bridge/tensor_parts.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/format/torch/zip_record.h"

namespace bytecheckpoint::bridge {
namespace {

namespace py = pybind11;

/// Every staged tensor begins in a cache line of its own, which also suits vector instructions; a large one at a page,
/// so that it can be written from there (`FileImage::append_borrowed`).
constexpr staging::PieceAlignment kTensorAlignment{64, format::kLargeDataAlignment, format::kLargeDataBytes};

/// Whether nobody can change the value.
bool is_immutable(py::handle value) {
  PyObject* const v = value.ptr();
  return v == Py_None || PyBool_Check(v) || PyLong_CheckExact(v) || PyFloat_CheckExact(v) || PyUnicode_CheckExact(v) ||
         PyBytes_CheckExact(v) || PyComplex_CheckExact(v);
}

struct ShardedTensorClass {
  py::object type = py::module_::import("torch.distributed._shard.sharded_tensor").attr("ShardedTensor");
};

bool is_sharded_tensor(py::handle value) {
  return is_tensor(value.ptr()) && is_instance(value, found_once<ShardedTensorClass>().type);
}

/// The longest time until Ctrl-C is noticed.
constexpr std::chrono::milliseconds kSignalInterval{50};

bool is_alike(const tensor::StridedView& a, const tensor::StridedView& b) {
  return a.data == b.data && a.dtype == b.dtype && a.sizes == b.sizes && a.strides_bytes == b.strides_bytes;
}

/// Returns the number of a view in `views`, and adds it if it is new. Tied tensors have the same number.
size_t number_of(const tensor::StridedView& view, std::vector<tensor::StridedView>* views, base::IndexTable* numbers) {
  const uint64_t hash = base::spread_hash(reinterpret_cast<uintptr_t>(view.data));
  const uint32_t known = numbers->find(hash, [&](uint32_t number) { return is_alike((*views)[number], view); });
  if (known != base::IndexTable::kNone) return known;
  numbers->insert(hash, static_cast<uint32_t>(views->size()));
  views->push_back(view);
  return views->size() - 1;
}

/// Whether a value of a staged tree is this tensor, or has it as its memory.
bool holds(py::handle value, PyObject* tensor) {
  if (is_dtensor(value)) return local_of(value).ptr() == tensor;
  if (!is_local_chunks(value)) return value.ptr() == tensor;
  for (const py::handle of_box : tensors_of_chunks(value)) {
    if (of_box.ptr() == tensor) return true;
  }
  return false;
}

std::vector<staging::DevicePiece> device_pieces(const std::vector<staging::Piece>& pieces) {
  std::vector<staging::DevicePiece> of_device;
  of_device.reserve(pieces.size());
  for (const staging::Piece& piece : pieces) of_device.push_back({piece.view, piece.offset});
  return of_device;
}

}  // namespace

StagedTree::StagedTree(py::handle state, py::object copy_other, py::object rewrap, py::object parts_of)
    : copy_other_(std::move(copy_other)),
      rewrap_(std::move(rewrap)),
      parts_of_(std::move(parts_of)),
      copier_([this](py::handle value) { return copy_leaf(value); }) {
  places_[staging::kHost];
  tree_ = copier_.copy(state);
  run_unlocked([&] { return lay_out(); });
}

StagedTree::~StagedTree() {
  give_up();
  // Tensors after the dicts that hold them: a dict would free all its tensors at once.
  tree_ = py::object();
  drop_in_breaths(&tensors_);
}

base::Status StagedTree::lay_out() {
  for (auto& [device, place] : places_) {
    place.numbers = {};
    if (!staging::lay_out(std::move(place.views), kTensorAlignment, &place.pieces, &num_bytes_)) {
      return base::Status::make(base::Code::kStagingFull, "staging: the state takes more bytes than can be counted");
    }
  }
  return base::Status::ok();
}

std::vector<int> StagedTree::devices() const {
  std::vector<int> devices;
  for (const auto& [device, place] : places_) {
    if (device != staging::kHost) devices.push_back(device);
  }
  return devices;
}

py::object StagedTree::copy_leaf(py::handle value) {
  gil_yield_.take();
  if (is_immutable(value)) return py::reinterpret_borrow<py::object>(value);
  if (is_plain_tensor(value.ptr())) {
    py::object staged = stage_tensor(value);
    if (is_marked_as_parts(value)) copy_marks(value, staged);
    return staged;
  }
  if (is_dtensor(value)) {
    const py::object local = local_of(value);
    if (is_plain_tensor(local.ptr())) return rewrap_(value, stage_tensor(local));
  }
  if (is_local_chunks(value)) {
    const py::tuple tensors = tensors_of_chunks(value);
    py::list staged;
    for (const py::handle tensor : tensors) staged.append(stage_tensor(tensor));
    return value.attr("of_same_boxes")(py::tuple(staged));
  }
  if (!parts_of_.is_none() && is_tensor(value.ptr())) {
    const py::object parts = parts_of_(value, copier_.path());
    if (!parts.is_none()) return copier_.copy_below(parts);
  }
  return copy_other_(value, copier_.path());
}

py::object StagedTree::stage_tensor(py::handle tensor) {
  Place* const place = place_of(tensor);
  if (place == nullptr) return copy_other_(tensor, copier_.path());
  base::Result<tensor::StridedView> view =
      place->merge == nullptr ? view_of_plain_tensor(tensor.ptr()) : view_of_cuda_tensor(tensor.ptr(), false);
  if (!view.is_ok()) raise(view.status().with_context("staging '" + copier_.path() + "'"));
  place->alive.push_back(py::reinterpret_borrow<py::object>(tensor));
  tensors_.push_back({PendingTensor(tensor.ptr()), place, number_of(view.value(), &place->views, &place->numbers)});
  return py::reinterpret_borrow<py::object>(tensors_.back().tensor.object());
}

/// Returns where the tensor's memory is. Null if its elements are not what its memory seems to hold, or if that memory
/// is out of reach.
StagedTree::Place* StagedTree::place_of(py::handle tensor) {
  if (is_host_memory(tensor.ptr())) return &places_[staging::kHost];
  const std::optional<int> device = cuda_device_of(tensor.ptr());
  return device.has_value() ? place_on(*device) : nullptr;
}

StagedTree::Place* StagedTree::place_on(int device) {
  const auto known = places_.find(device);
  if (known != places_.end()) return &known->second;
  auto merge = unlocked([&] { return staging::SharedDeviceMerge::find(device); });
  if (merge.status().code() == base::Code::kUnsupported) return nullptr;
  if (!merge.is_ok()) raise(merge.status().with_context("staging '" + copier_.path() + "'"));
  Place& place = places_[device];
  place.merge = std::move(merge.value());
  return &place;
}

void StagedTree::fill(const std::shared_ptr<staging::Lease>& lease, int num_threads,
                      const std::map<int, uintptr_t>& streams, bool has_hashes) {
  has_hashes_ = has_hashes && base::has_content_hash();
  check_memories();
  uint8_t* const first = lease->pages()->first();
  lease_ = lease;
  base::Status status = unlocked([&] {
    const MemoryOwner owner(lease);
    for (Staged& staged : tensors_) {
      const staging::Piece& piece = staged.place->pieces[staged.view];
      if (piece.bytes != 0) staged.tensor.settle(first + piece.offset, owner);
    }
    return fill_memory(first, num_threads, streams);
  });
  if (!status.is_ok()) {
    lease_.reset();
    raise(std::move(status).with_context("staging"));
  }
  drop_in_breaths(&places_[staging::kHost].alive);
}

/// Raises InvalidPlanError if a tensor has lost its memory since the constructor looked: a save may wait for a lease.
void StagedTree::check_memories() const {
  std::map<const Place*, size_t> numbers;
  for (const Staged& staged : tensors_) {
    const py::object& tensor = staged.place->alive[numbers[staged.place]++];
    if (is_still_memory_of(tensor.ptr(), staged.place->pieces[staged.view].view)) continue;
    std::string key;
    TreeCopier finder([&](py::handle value) {
      if (key.empty() && holds(value, staged.tensor.object())) key = finder.path();
      return py::reinterpret_borrow<py::object>(value);
    });
    (void)finder.copy(tree_);
    raise(base::Status::make(base::Code::kInvalidArgument,
                             base::text("staging '", key,
                                        "': the memory of the tensor was freed, shrunk or exchanged "
                                        "while the save waited for staging memory")));
  }
}

base::Status StagedTree::fill_memory(uint8_t* first, int num_threads, const std::map<int, uintptr_t>& streams) {
  for (const auto& [device, place] : places_) {
    if (device == staging::kHost) continue;
    const base::Status pinned = staging::pin_pages(device, num_bytes_, lease_->pages().get());
    if (!pinned.is_ok()) slow_because_ = pinned.message();
    const auto stream = streams.find(device);
    if (stream == streams.end()) {
      gather_.end();
      return base::Status::make(base::Code::kInvalidArgument, base::text("no stream of device ", device));
    }
    BCP_RETURN_IF_ERROR(gather_.begin_gather(place.merge, device_pieces(place.pieces), first, stream->second));
  }
  // The host works while the devices copy.
  const std::vector<staging::Piece>& on_host = places_[staging::kHost].pieces;
  staging::PieceChecksums checksums;
  checksums.has_hashes = has_hashes_;
  staging::merge_pieces(on_host, first, num_threads, &checksums);
  staged_ = staging::StagedBytes::of(first, on_host, checksums);
  if (places_.size() == 1) {
    lease_->keep_checksums(std::move(staged_));
    lease_.reset();
    places_[staging::kHost].pieces = {};
  }
  return base::Status::ok();
}

void StagedTree::wait() {
  for (bool is_done = false; !is_done;) {
    const base::Result<bool> result = unlocked([&] { return gather_.wait_for(kSignalInterval); });
    if (!result.is_ok()) {
      give_up();
      raise(result.status().with_context("staging"));
    }
    is_done = result.value();
    if (!is_done && PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  for (auto& [device, place] : places_) drop_in_breaths(&place.alive);
}

void StagedTree::give_up() {
  if (gather_.is_under_way()) unlocked([&] { gather_.end(); });
  for (auto& [device, place] : places_) drop_in_breaths(&place.alive);
  lease_.reset();
}

void StagedTree::checksum(int num_threads) {
  if (lease_ == nullptr) return;
  unlocked([&] {
    for (const auto& [device, place] : places_) {
      if (device == staging::kHost) continue;
      staging::PieceChecksums checksums;
      checksums.has_hashes = has_hashes_;
      staging::checksum_pieces(place.pieces, staged_.first, num_threads, &checksums);
      staged_.add(place.pieces, checksums);
    }
    lease_->keep_checksums(std::move(staged_));
  });
  lease_.reset();
}

SplitState take_apart(py::handle tree, const uint8_t* first, int64_t bytes, py::object stand_in, py::object apart) {
  base::ByteWriter table;
  GilYield gil_yield;
  /// Adds the tensor to the table if it is in that memory, and returns whether it is.
  const auto note = [&](py::handle tensor) {
    if (!is_plain_tensor(tensor.ptr()) || !is_host_memory(tensor.ptr())) return false;
    const auto view = view_of_plain_tensor(tensor.ptr());
    if (!view.is_ok() || !tensor::is_row_major(view.value())) return false;
    const tensor::StridedView& staged = view.value();
    const int64_t span = tensor::span_bytes(staged);
    if (span != 0 && (staged.data < first || span > bytes || staged.data - first > bytes - span)) return false;
    table.i64(span == 0 ? 0 : staged.data - first);
    table.i64(kind_of_tensor(tensor.ptr()));
    table.u32(static_cast<uint32_t>(staged.sizes.size()));
    for (const int64_t size : staged.sizes) table.i64(size);
    return true;
  };
  TreeCopier copier([&](py::handle value) -> py::object {
    gil_yield.take();
    if (is_marked_as_parts(value) && note(value)) return apart(value);
    if (is_plain_tensor(value.ptr()) && note(value)) return stand_in;
    if ((is_dtensor(value) && note(local_of(value))) || is_sharded_tensor(value)) return apart(value);
    return py::reinterpret_borrow<py::object>(value);
  });
  py::object left = copier.copy(tree);
  return {std::move(left), table.take()};
}

py::object put_together(py::handle tree, std::string_view tensors, std::shared_ptr<staging::Pages> pages,
                        py::object stand_in, py::object join) {
  base::ByteReader table(tensors);
  GilYield gil_yield;
  uint8_t* const first = pages->first();
  const MemoryOwner owner(std::move(pages));
  const auto next = [&]() -> py::object {
    const int64_t offset = table.i64(), kind = table.i64();
    tensor::Dims sizes(std::min<size_t>(table.u32(), table.remaining() / sizeof(int64_t)));
    for (int64_t& size : sizes) size = table.i64();
    if (!table.ok()) raise(base::Status::make(base::Code::kInvalidArgument, "a staged state has lost its tensors"));
    PendingTensor tensor(std::move(sizes), kind);
    tensor.settle(first + offset, owner);
    return py::reinterpret_borrow<py::object>(tensor.object());
  };
  const py::cpp_function next_tensor(next);
  TreeCopier copier([&](py::handle value) -> py::object {
    gil_yield.take();
    if (value.is(stand_in)) return next();
    return join(value, next_tensor);
  });
  return copier.copy(tree);
}

}  // namespace bytecheckpoint::bridge
