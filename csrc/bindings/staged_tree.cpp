// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/staged_tree.h"

#include "csrc/base/bytes.h"
#include "csrc/bindings/errors.h"
#include "csrc/bindings/held_state.h"
#include "csrc/bindings/unlocked.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;

/// Of every staged tensor: a line of a cache, and what vector instructions like.
constexpr int64_t kTensorAlignment = 64;

/// Nobody can change it.
bool is_immutable(py::handle value) {
  PyObject* const v = value.ptr();
  return v == Py_None || PyBool_Check(v) || PyLong_CheckExact(v) || PyFloat_CheckExact(v) || PyUnicode_CheckExact(v) ||
         PyBytes_CheckExact(v) || PyComplex_CheckExact(v);
}

bool is_alike(const tensor::StridedView& a, const tensor::StridedView& b) {
  return a.data == b.data && a.dtype == b.dtype && a.sizes == b.sizes && a.strides_bytes == b.strides_bytes;
}

}  // namespace

StagedTree::StagedTree(py::handle state, py::object copy_other, py::object rewrap)
    : copy_other_(std::move(copy_other)),
      rewrap_(std::move(rewrap)),
      copier_([this](py::handle value) { return copy_leaf(value); }) {
  tree_ = copier_.copy(state);
  if (!staging::lay_out(std::move(views_), kTensorAlignment, &pieces_, &num_bytes_)) {
    raise(base::Status::make(base::Code::kStagingFull, "staging: the state takes more bytes than can be counted"));
  }
}

py::object StagedTree::copy_leaf(py::handle value) {
  breath_.take();
  if (is_immutable(value)) return py::reinterpret_borrow<py::object>(value);
  if (is_plain_tensor(value.ptr())) return stage_tensor(value);
  if (is_dtensor(value)) {
    const py::object local = local_of(value);
    if (is_plain_tensor(local.ptr())) return rewrap_(value, stage_tensor(local));
  }
  return copy_other_(value, copier_.path());
}

py::object StagedTree::stage_tensor(py::handle tensor) {
  if (!is_host_memory(tensor.ptr())) return copy_other_(tensor, copier_.path());
  base::Result<tensor::StridedView> view = view_of_plain_tensor(tensor.ptr());
  if (!view.is_ok()) raise(view.status().with_context("staging '" + copier_.path() + "'"));
  alive_.push_back(py::reinterpret_borrow<py::object>(tensor));
  PendingTensor& pending = tensors_.emplace_back(PendingTensor(tensor.ptr()), view_number(view.value())).first;
  return py::reinterpret_borrow<py::object>(pending.object());
}

/// Tied tensors have one.
size_t StagedTree::view_number(const tensor::StridedView& view) {
  std::vector<size_t>& here = views_at_[view.data];
  for (const size_t number : here) {
    if (is_alike(views_[number], view)) return number;
  }
  views_.push_back(view);
  here.push_back(views_.size() - 1);
  return here.back();
}

void StagedTree::fill(const std::shared_ptr<staging::Lease>& lease, int num_threads) {
  uint8_t* const first = lease->pages()->first();
  for (auto& [tensor, number] : tensors_) {
    breath_.take();
    if (pieces_[number].bytes != 0) tensor.settle(first + pieces_[number].offset, lease);
  }
  unlocked([&] {
    staging::PieceSums sums;
    staging::merge_pieces(pieces_, first, num_threads, &sums);
    lease->keep_sums(staging::StagedBytes::of(first, pieces_, std::move(sums)));
  });
  alive_.clear();
}

TakenApart take_apart(py::handle tree, const uint8_t* first, int64_t bytes, py::object stand_in,
                      py::object apart_dtensor) {
  base::ByteWriter table;
  Breath breath;
  /// Is it in that memory, so that it is in the table now?
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
    breath.take();
    if (is_plain_tensor(value.ptr()) && note(value)) return stand_in;
    if (is_dtensor(value) && note(local_of(value))) return apart_dtensor(value);
    return py::reinterpret_borrow<py::object>(value);
  });
  py::object left = copier.copy(tree);
  return {std::move(left), table.take()};
}

py::object put_together(py::handle tree, std::string_view tensors, std::shared_ptr<staging::Pages> pages,
                        py::object stand_in, py::object join_dtensor) {
  base::ByteReader table(tensors);
  Breath breath;
  const auto next = [&]() -> py::object {
    const int64_t offset = table.i64(), kind = table.i64();
    tensor::Dims sizes(std::min<size_t>(table.u32(), table.remaining() / sizeof(int64_t)));
    for (int64_t& size : sizes) size = table.i64();
    if (!table.ok()) raise(base::Status::make(base::Code::kInvalidArgument, "a staged state has lost its tensors"));
    PendingTensor tensor(std::move(sizes), kind);
    tensor.settle(pages->first() + offset, pages);
    return py::reinterpret_borrow<py::object>(tensor.object());
  };
  const py::cpp_function next_tensor(next);
  TreeCopier copier([&](py::handle value) -> py::object {
    breath.take();
    if (value.is(stand_in)) return next();
    return join_dtensor(value, next_tensor);
  });
  return copier.copy(tree);
}

}  // namespace bytecheckpoint::bindings
