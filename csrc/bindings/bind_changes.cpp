// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/bindings/bind.h"
#include "csrc/bridge/errors.h"
#include "csrc/bridge/torch_tensor.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/staging/changes.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

using base::Code;
using base::Status;
using base::text;
using staging::Changes;
using staging::Patch;
using tensor::StridedView;

StridedView view_of(py::handle object, bool writable, const std::string& what) {
  raise_if_error(check_memory(object.ptr()).with_context(what));
  auto view = view_of_tensor(object.ptr(), writable);
  if (!view.is_ok()) raise(view.status().with_context(what));
  return std::move(view.value());
}

/// Refuses memory that is not row-major, or of another shape or dtype than is needed.
void check_flat(const StridedView& view, tensor::DType dtype, const tensor::Dims& sizes, const std::string& what) {
  if (view.dtype == dtype && view.sizes == sizes && tensor::is_row_major(view)) return;
  raise(Status::make(Code::kInvalidArgument,
                     text(what, ": must be contiguous, ", tensor::find_dtype(dtype)->name, " ", tensor::to_text(sizes),
                          ", got ", tensor::find_dtype(view.dtype)->name, " ", tensor::to_text(view.sizes))));
}

std::unique_ptr<Changes> find_changes(const py::list& now, const py::list& before, int num_threads,
                                      int64_t most_bytes) {
  if (now.size() != before.size()) throw py::value_error("now and before: not as many tensors");
  std::vector<staging::Compared> compared;
  for (size_t i = 0; i < now.size(); ++i) {
    StridedView view = view_of(now[i], /*writable=*/false, text("now[", i, "]"));
    const StridedView copy = view_of(before[i], /*writable=*/false, text("before[", i, "]"));
    check_flat(copy, view.dtype, view.sizes, text("before[", i, "]"));
    compared.push_back({std::move(view), copy.data});
  }
  std::optional<Changes> found = unlocked([&] { return Changes::find(compared, num_threads, most_bytes); });
  return found.has_value() ? std::make_unique<Changes>(std::move(*found)) : nullptr;
}

void write_changes(const Changes& changes, size_t number, py::handle positions, py::handle values) {
  if (number >= changes.num_tensors()) throw py::index_error(text("changes of tensor ", number));
  const StridedView places = view_of(positions, /*writable=*/true, "positions");
  const StridedView bits = view_of(values, /*writable=*/true, "values");
  const tensor::Dims sizes = {changes.count(number)};
  const bool is_wide = changes.position_bytes(number) == 8;
  check_flat(places, is_wide ? tensor::DType::kUInt64 : tensor::DType::kUInt32, sizes, "positions");
  check_flat(bits, bits.dtype, sizes, "values");
  if (tensor::find_dtype(bits.dtype)->itemsize_bytes != changes.itemsize_bytes(number)) {
    throw py::value_error("values: of another dtype than the tensor");
  }
  unlocked([&] { changes.write(number, places.data, bits.data); });
}

/// What Python hands over: the memory, the offsets of the box that it holds, the box of the positions, which count in
/// it, the positions, and the values there.
using PatchArguments =
    std::tuple<py::object, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, py::object, py::object>;

std::vector<Patch> patches_of(const std::vector<PatchArguments>& arguments, bool writable) {
  std::vector<Patch> patches;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& [memory, to, from, from_sizes, positions, values] = arguments[i];
    const std::string what = text("patches[", i, "]");
    Patch patch;
    patch.memory = view_of(memory, writable, what);
    const StridedView places = view_of(positions, /*writable=*/false, what + ": positions");
    const StridedView bits = view_of(values, /*writable=*/false, what + ": values");
    patch.position_bytes = places.dtype == tensor::DType::kUInt64 ? 8 : 4;
    const tensor::Dims sizes = {bits.sizes.empty() ? 0 : bits.sizes[0]};
    check_flat(places, patch.position_bytes == 8 ? tensor::DType::kUInt64 : tensor::DType::kUInt32, sizes,
               what + ": positions");
    check_flat(bits, patch.memory.dtype, sizes, what + ": values");
    patch.from = {{from.begin(), from.end()}, {from_sizes.begin(), from_sizes.end()}};
    patch.to = {{to.begin(), to.end()}, patch.memory.sizes};
    const size_t dims = patch.memory.sizes.size();
    if (from.size() != dims || from_sizes.size() != dims || to.size() != dims) {
      throw py::value_error(what + ": the boxes are not of as many dims as the tensor");
    }
    const auto is_negative = [](int64_t number) { return number < 0; };
    for (const tensor::Box* box : {&patch.from, &patch.to}) {
      if (std::any_of(box->offsets.begin(), box->offsets.end(), is_negative) ||
          std::any_of(box->sizes.begin(), box->sizes.end(), is_negative)) {
        throw py::value_error(what + ": a box has a negative number");
      }
    }
    patch.positions = places.data;
    patch.values = bits.data;
    patch.count = sizes[0];
    patches.push_back(std::move(patch));
  }
  return patches;
}

void check_patches(const std::vector<PatchArguments>& arguments) {
  const std::vector<Patch> patches = patches_of(arguments, /*writable=*/false);
  run_unlocked([&]() -> Status {
    for (const Patch& patch : patches) BCP_RETURN_IF_ERROR(staging::check_positions(patch));
    return Status::ok();
  });
}

void apply_patches(const std::vector<PatchArguments>& arguments, int num_threads) {
  const std::vector<Patch> patches = patches_of(arguments, /*writable=*/true);
  run_unlocked([&]() -> Status {
    for (const Patch& patch : patches) BCP_RETURN_IF_ERROR(staging::check_positions(patch));
    staging::apply_patches(patches, num_threads);
    return Status::ok();
  });
  std::vector<PyObject*> written;
  for (const PatchArguments& of_patch : arguments) written.push_back(std::get<0>(of_patch).ptr());
  increment_versions(written);
}

}  // namespace

void bind_changes(py::module_& m) {
  py::class_<Changes>(m, "Changes", py::module_local())
      .def_property_readonly("counts",
                             [](const Changes& changes) {
                               std::vector<int64_t> counts(changes.num_tensors());
                               for (size_t i = 0; i < counts.size(); ++i) counts[i] = changes.count(i);
                               return counts;
                             })
      .def("write", &write_changes, py::arg("number"), py::arg("positions"), py::arg("values"));
  m.def("find_changes", &find_changes, py::arg("now"), py::arg("before"), py::kw_only(), py::arg("num_threads"),
        py::arg("most_bytes"));
  m.def("position_bytes", &staging::position_bytes, py::arg("numel"));
  m.def("check_patches", &check_patches, py::arg("patches"));
  m.def("apply_patches", &apply_patches, py::arg("patches"), py::kw_only(), py::arg("num_threads"));
}

}  // namespace bytecheckpoint::bindings
