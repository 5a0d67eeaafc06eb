// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind.h"

#include <pybind11/stl.h>

#include "csrc/bridge/checkpoint.h"
#include "csrc/bridge/dims_caster.h"
#include "csrc/bridge/errors.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/engine/load/checkpoint_view.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

using engine::CheckpointViewBuilder;
using Tensor = CheckpointViewBuilder::Tensor;

/// Applies an operation on views to a tensor.
template <class Change>
Tensor changed(const Tensor& tensor, Change change) {
  Tensor out = tensor;
  out.view = value_unlocked([&] { return change(tensor.view); });
  return out;
}

}  // namespace

// NOLINTNEXTLINE(readability-function-size): a list of what Python sees.
void bind_view(py::module_& m) {
  py::class_<Tensor>(m, "ViewTensor", py::module_local())
      .def_property_readonly("shape", [](const Tensor& t) { return t.view.sizes; })
      .def_property_readonly("dtype", [](const Tensor& t) { return tensor::find_dtype(t.info.dtype)->name; })
      .def(
          "narrow",
          [](const Tensor& t, size_t dim, int64_t begin, int64_t length) {
            return changed(t,
                           [&](const planner::TensorView& view) { return planner::narrow(view, dim, begin, length); });
          },
          py::arg("dim"), py::arg("begin"), py::arg("length"))
      .def(
          "pad",
          [](const Tensor& t, size_t dim, int64_t size) {
            return value_unlocked([&] { return CheckpointViewBuilder::padded(t, dim, size); });
          },
          py::arg("dim"), py::arg("size"))
      .def(
          "permute",
          [](const Tensor& t, const std::vector<size_t>& dims) {
            return changed(t, [&](const planner::TensorView& view) { return planner::permute(view, dims); });
          },
          py::arg("dims"))
      .def(
          "reshape",
          [](const Tensor& t, const tensor::Dims& shape) {
            return changed(t, [&](const planner::TensorView& view) { return planner::reshape(view, shape); });
          },
          py::arg("shape"));
  py::class_<CheckpointViewBuilder>(m, "ViewBuilder", py::module_local())
      .def(py::init([](const Checkpoint& stored) { return new CheckpointViewBuilder(stored.shared_whole()); }),
           py::arg("stored"))
      .def(
          "tensor",
          [](CheckpointViewBuilder& builder, const std::string& fqn) { return value_or_raise(builder.tensor(fqn)); },
          py::arg("fqn"))
      .def_static(
          "cat",
          [](const std::vector<Tensor>& parts, size_t dim) {
            return value_unlocked([&] { return CheckpointViewBuilder::joined(parts, dim, /*is_stack=*/false); });
          },
          py::arg("parts"), py::arg("dim"))
      .def_static(
          "stack",
          [](const std::vector<Tensor>& parts, size_t dim) {
            return value_unlocked([&] { return CheckpointViewBuilder::joined(parts, dim, /*is_stack=*/true); });
          },
          py::arg("parts"), py::arg("dim"))
      .def(
          "dequantize",
          [](CheckpointViewBuilder& builder, const Tensor& codes, const Tensor& scales, const tensor::Dims& block,
             const std::string& dtype, bool is_packed) {
            const tensor::DTypeInfo* info = tensor::find_dtype(dtype);
            const tensor::DType values = info == nullptr ? tensor::DType::kNone : info->dtype;
            return value_unlocked([&] { return builder.dequantized(codes, scales, block, values, is_packed); });
          },
          py::arg("codes"), py::arg("scales"), py::arg("block"), py::arg("dtype"), py::arg("is_packed"))
      .def(
          "add",
          [](CheckpointViewBuilder& builder, std::string fqn, const Tensor& tensor) {
            raise_if_error(builder.add(std::move(fqn), tensor));
          },
          py::arg("fqn"), py::arg("tensor"))
      .def(
          "keep",
          [](CheckpointViewBuilder& builder, const std::vector<std::pair<std::string, std::string>>& names) {
            for (const auto& [fqn, stored] : names) raise_if_error(builder.keep(fqn, stored));
          },
          py::arg("names"))
      .def("finish", [](CheckpointViewBuilder& builder) {
        return CheckpointHolder(new Checkpoint(value_unlocked([&] { return builder.finish(); })));
      });
}

}  // namespace bytecheckpoint::bindings
