// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/bindings/bind.h"
#include "csrc/bridge/staged_tree.h"
#include "csrc/bridge/tensor_parts.h"
#include "csrc/bridge/unlocked.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

using base::Code;
using base::Status;
using staging::Arena;
using staging::Lease;
using staging::Pages;

/// Returns None if all regions are leased.
std::shared_ptr<Lease> try_lease(int64_t num_bytes, int64_t limit_bytes, bool is_shareable, int num_states,
                                 std::string what) {
  const staging::ArenaTerms terms{limit_bytes, is_shareable, num_states, std::move(what)};
  auto lease = unlocked([&] { return Arena::of_process().try_lease(num_bytes, terms); });
  if (lease.status().code() == Code::kStagingBusy) return nullptr;
  return value_or_raise(std::move(lease));
}

/// Returns memory with the first `num_bytes` of a lease that another process can map: the lease's own, or a copy.
std::shared_ptr<Pages> shareable_pages(const Lease& lease, int64_t num_bytes) {
  if (lease.pages()->fd() >= 0) return lease.pages();
  return value_unlocked([&]() -> base::Result<std::shared_ptr<Pages>> {
    BCP_ASSIGN_OR_RETURN(std::shared_ptr<Pages> copy, Pages::map_shareable(num_bytes, "staging"));
    std::memcpy(copy->first(), lease.pages()->first(), static_cast<size_t>(num_bytes));
    return copy;
  });
}

/// The checksums of a state that came from another process. This process knows them as long as `pages` live.
struct ReceivedPages {
  std::shared_ptr<Pages> pages;
  std::shared_ptr<const staging::StagedBytes> staged;
};

/// Maps pages of another process, with what it staged there.
std::shared_ptr<Pages> receive_pages(int fd, int64_t num_bytes, const std::string& checksums) {
  auto received = std::make_shared<ReceivedPages>();
  received->pages = value_unlocked([&] { return Pages::map_shared(fd, num_bytes, "staged state"); });
  staging::StagedBytes staged = value_or_raise(staging::decode_staged(checksums, received->pages->first(), num_bytes));
  received->staged = std::make_shared<const staging::StagedBytes>(std::move(staged));
  staging::list_staged(received->staged);
  Pages* const pages = received->pages.get();
  return {std::move(received), pages};
}

bool is_expanded(const tensor::StridedView& view) {
  if (tensor::span_bytes(view) == 0) return false;
  for (size_t d = 0; d < view.sizes.size(); ++d) {
    if (view.sizes[d] > 1 && view.strides_bytes[d] == 0) return true;
  }
  return false;
}

std::vector<tensor::StridedView> views_of(const py::list& tensors, bool writable) {
  std::vector<tensor::StridedView> views;
  for (size_t i = 0; i < tensors.size(); ++i) {
    auto view = view_of_tensor(tensors[i].ptr(), writable);
    if (!view.is_ok()) raise(view.status().with_context(base::text("tensors[", i, "]")));
    if (writable && is_expanded(view.value())) {
      raise(Status::make(Code::kInvalidArgument,
                         base::text("tensors[", i, "]: the tensor is expanded: its elements share memory")));
    }
    views.push_back(std::move(view.value()));
  }
  return views;
}

/// The pieces of `tensors`, and the memory that they are merged into.
struct MergeInput {
  MergeInput(const py::list& tensors, py::handle merged, int64_t alignment, bool into_tensors) {
    if (!staging::lay_out(views_of(tensors, into_tensors), {alignment, alignment}, &pieces, &num_bytes)) {
      raise(Status::make(Code::kInvalidArgument, "tensors: more bytes than can be counted"));
    }
    if (merged.is_none()) return;
    auto view = view_of_tensor(merged.ptr(), !into_tensors);
    if (!view.is_ok()) raise(view.status().with_context("merged"));
    memory = view.value().data;
    const tensor::Dims& sizes = view.value().sizes;
    if (view.value().dtype != tensor::DType::kUInt8 || sizes.size() != 1 || sizes[0] < num_bytes ||
        !tensor::is_row_major(view.value())) {
      raise(Status::make(
          Code::kInvalidArgument,
          base::text("merged: must be a contiguous uint8 tensor of one dim and at least ", num_bytes, " bytes, got ",
                     tensor::find_dtype(view.value().dtype)->name, " ", tensor::to_text(sizes))));
    }
  }

  std::vector<staging::Piece> pieces;
  int64_t num_bytes = 0;
  uint8_t* memory = nullptr;
};

}  // namespace

// NOLINTNEXTLINE(readability-function-size): a list of what Python sees.
void bind_staging(py::module_& m) {
  py::class_<Pages, std::shared_ptr<Pages>>(m, "Pages", py::module_local())
      .def_property_readonly("fd", &Pages::fd)
      .def_property_readonly("num_bytes", &Pages::bytes);
  py::class_<Lease, std::shared_ptr<Lease>>(m, "Lease", py::module_local())
      .def("release", [](Lease& lease) { unlocked([&] { lease.release(); }); })
      .def("checksums", [](Lease& lease) { return py::bytes(lease.encoded_checksums()); })
      .def("shareable_pages", &shareable_pages, py::arg("num_bytes"));
  m.def("try_lease", &try_lease, py::kw_only(), py::arg("num_bytes"), py::arg("limit_bytes"), py::arg("is_shareable"),
        py::arg("num_states"), py::arg("what"));
  m.def("lease_holders", [] {
    py::list holders;
    for (const staging::LeaseHolder& holder : unlocked([] { return Arena::of_process().holders(); })) {
      holders.append(py::make_tuple(holder.bytes, holder.held_s, holder.what));
    }
    return holders;
  });
  m.def(
      "prepare_arena",
      [](int64_t num_bytes, bool is_shareable) {
        const staging::ArenaTerms terms{num_bytes, is_shareable, 1, {}};
        run_unlocked([&] { return Arena::of_process().prepare(num_bytes, terms); });
      },
      py::kw_only(), py::arg("num_bytes"), py::arg("is_shareable"));
  m.def(
      "wait_for_release",
      [](double timeout_s) {
        unlocked([&] {
          Arena::of_process().wait_for_release(std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1e3)));
        });
      },
      py::arg("timeout_s"));
  m.def("close_arena", [] {
    unlocked([] {
      Arena::of_process().close();
      staging::BorrowedRing::free_idle();
      staging::SharedDeviceMerge::drop_all();
    });
  });
  m.def("arena_bytes", [] { return Arena::of_process().mapped_bytes(); });
  py::class_<StagedTree>(m, "StagedTree", py::module_local())
      .def(py::init<py::handle, py::object, py::object, py::object>(), py::arg("state"), py::arg("copy_other"),
           py::arg("rewrap"), py::arg("parts_of") = py::none())
      .def_property_readonly("num_bytes", &StagedTree::num_bytes)
      .def_property_readonly("tree", &StagedTree::tree)
      .def_property_readonly("devices", &StagedTree::devices)
      .def_property_readonly("slow_because", &StagedTree::slow_because)
      .def("fill", &StagedTree::fill, py::arg("lease"), py::arg("num_threads"), py::arg("streams"),
           py::arg("has_hashes") = false)
      .def("wait", &StagedTree::wait)
      .def("give_up", &StagedTree::give_up)
      .def("checksum", &StagedTree::checksum, py::arg("num_threads"));
  m.def("is_marked_as_parts", &is_marked_as_parts, py::arg("tensor"));
  m.def("copy_marks", &copy_marks, py::arg("marked"), py::arg("copy"));
  m.def(
      "take_apart",
      [](py::handle tree, const Lease& lease, int64_t num_bytes, py::object stand_in, py::object apart) {
        SplitState taken = take_apart(tree, lease.pages()->first(), num_bytes, std::move(stand_in), std::move(apart));
        return py::make_tuple(std::move(taken.tree), py::bytes(taken.tensors));
      },
      py::arg("tree"), py::arg("lease"), py::arg("num_bytes"), py::arg("stand_in"), py::arg("apart"));
  m.def("receive_pages", &receive_pages, py::arg("fd"), py::arg("num_bytes"), py::arg("checksums"));
  m.def(
      "put_together",
      [](py::handle tree, const py::bytes& tensors, std::shared_ptr<Pages> pages, py::object stand_in,
         py::object join) {
        return put_together(tree, std::string_view(tensors), std::move(pages), std::move(stand_in), std::move(join));
      },
      py::arg("tree"), py::arg("tensors"), py::arg("pages"), py::arg("stand_in"), py::arg("join"));
  m.def(
      "merged_bytes",
      [](const py::list& tensors, int64_t alignment) {
        return MergeInput(tensors, py::none(), alignment, false).num_bytes;
      },
      py::arg("tensors"), py::arg("alignment"));
  m.def(
      "merge",
      [](const py::list& tensors, py::handle merged, int64_t alignment, int num_threads) {
        const MergeInput merging(tensors, merged, alignment, false);
        unlocked([&] { staging::merge_pieces(merging.pieces, merging.memory, num_threads, nullptr); });
      },
      py::arg("tensors"), py::arg("merged"), py::arg("alignment"), py::arg("num_threads"));
  m.def(
      "scatter",
      [](const py::list& tensors, py::handle merged, int64_t alignment, int num_threads) {
        const MergeInput merging(tensors, merged, alignment, true);
        unlocked([&] { staging::scatter_pieces(merging.pieces, merging.memory, num_threads); });
      },
      py::arg("tensors"), py::arg("merged"), py::arg("alignment"), py::arg("num_threads"));
}

}  // namespace bytecheckpoint::bindings
