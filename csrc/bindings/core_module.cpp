// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "csrc/base/bytes.h"
#include "csrc/bindings/bind.h"
#include "csrc/bindings/build_info.h"
#include "csrc/bridge/dims_caster.h"
#include "csrc/bridge/errors.h"
#include "csrc/planner/block_cuts.h"
#include "csrc/staging/available_memory.h"
#include "csrc/tensor/flat_range.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

using tensor::Dims;

/// Returns, for [(sizes, position in the flat tensor), ...], the boxes of each tensor that are in elements [begin, end)
/// of all of them, flat and one after the other: [[(offsets, sizes, position in the shard), ...], ...].
py::list boxes_of_flat_shard(const std::vector<std::tuple<Dims, int64_t>>& tensors, int64_t begin, int64_t end) {
  py::list all;
  for (const auto& [sizes, position] : tensors) {
    int64_t numel = 0, tensor_end = 0;
    if (begin < 0 || begin > end || position < 0 || !tensor::checked_numel(sizes, &numel) ||
        !base::checked_add(position, numel, &tensor_end)) {
      raise(base::Status::make(
          base::Code::kInvalidArgument,
          base::text("elements [", begin, ", ", end, ") of a flat tensor, in which a tensor of ",
                     tensor::to_text(sizes), " begins at element ", position, ": impossible numbers")));
    }
    const int64_t first = std::clamp(begin, position, tensor_end), last = std::clamp(end, position, tensor_end);
    int64_t at = first - begin;
    py::list of_tensor;
    for (tensor::Box& box : value_or_raise(tensor::boxes_of_flat_range(sizes, first - position, last - position))) {
      of_tensor.append(py::make_tuple(py::tuple(py::cast(box.offsets)), py::tuple(py::cast(box.sizes)), at));
      tensor::checked_numel(box.sizes, &numel);
      at += numel;
    }
    all.append(std::move(of_tensor));
  }
  return all;
}

}  // namespace

void bind_core(py::module_& m) {
  m.def("build_info", &build_info);
  m.def("available_memory_bytes", [] { return staging::available_memory_bytes(); });
  m.def("dtype_names", [] {
    std::vector<std::string> names;
    for (uint8_t code = 1; code <= tensor::kLastDType; ++code) {
      if (const tensor::DTypeInfo* info = tensor::find_plain_dtype(code)) names.emplace_back(info->name);
    }
    return names;
  });
  m.def("boxes_of_flat_shard", &boxes_of_flat_shard, py::arg("tensors"), py::arg("begin"), py::arg("end"));
  m.def(
      "block_cuts",
      [](const Dims& sizes, const std::vector<int64_t>& cuts, int64_t min_block_elements) {
        return value_or_raise(planner::block_cuts(sizes, cuts, min_block_elements));
      },
      py::arg("sizes"), py::arg("cuts"), py::arg("min_block_elements"));
}

}  // namespace bytecheckpoint::bindings

PYBIND11_MODULE(_core, m) {
  m.doc() = "Format, planning and checks; needs no torch.";
  bytecheckpoint::bindings::bind_core(m);
  bytecheckpoint::bindings::bind_builtin(m);
  bytecheckpoint::bindings::bind_calls(m);
  bytecheckpoint::bindings::bind_checkpoint(m);
  bytecheckpoint::bindings::bind_view(m);
  bytecheckpoint::bindings::bind_copy(m);
  bytecheckpoint::bindings::bind_export(m);
  bytecheckpoint::bindings::bind_row_major(m);
  bytecheckpoint::bindings::bind_steps(m);
  bytecheckpoint::bindings::bind_store(m);
  bytecheckpoint::bindings::bind_trace_summary(m);
  bytecheckpoint::bindings::bind_verify(m);
}
