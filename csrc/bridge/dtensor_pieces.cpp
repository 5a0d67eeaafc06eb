// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/dtensor_pieces.h"

#include <cstdint>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "csrc/bridge/errors.h"
#include "csrc/bridge/gil_yield.h"
#include "csrc/bridge/python_calls.h"
#include "csrc/bridge/state_values.h"
#include "csrc/bridge/torch_tensor.h"

namespace bytecheckpoint::bridge {
namespace {

namespace py = pybind11;

/// Names and classes, looked up once and never freed.
struct NamesOfDTensors {
  py::module_ of_tensors = py::module_::import("torch.distributed.tensor");
  py::object shard = of_tensors.attr("Shard"), replicate = of_tensors.attr("Replicate");
  py::object device_mesh = py::str("device_mesh"), placements = py::str("placements"), dim = py::str("dim");
};

const NamesOfDTensors& names_of_dtensors() {
  return found_once<NamesOfDTensors>();
}

/// Whether DCP's box is right whatever the shape, where the mesh is in order: each dim is sharded by one axis at most,
/// and in one run.
bool is_simple(const py::tuple& placements) {
  std::vector<int64_t> dims;
  for (const py::handle placement : placements) {
    auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(placement.ptr()));
    if (type == names_of_dtensors().replicate.ptr()) continue;
    if (type != names_of_dtensors().shard.ptr()) return false;
    const auto dim = attribute(placement, names_of_dtensors().dim).cast<int64_t>();
    // A negative dim may be one of the others.
    for (const int64_t other : dims) {
      if (other == dim || other < 0 || dim < 0) return false;
    }
    dims.push_back(dim);
  }
  return true;
}

class PiecesFinder {
 public:
  PiecesFinder(py::object order_of, py::object pieces_of, py::object is_in_order)
      : order_of_(std::move(order_of)), pieces_of_(std::move(pieces_of)), is_in_order_(std::move(is_in_order)) {}

  /// Returns the pieces of a DTensor; None if DCP is right.
  py::object find(py::handle dtensor) {
    const py::tuple placements = attribute(dtensor, names_of_dtensors().placements);
    // The mesh is identified by its address, which it keeps while the state lives.
    const py::object mesh = attribute(dtensor, names_of_dtensors().device_mesh);
    if (is_simple(placements) && is_in_order(mesh)) return py::none();
    std::vector<int64_t> key = {reinterpret_cast<intptr_t>(mesh.ptr()), number_in(numbers_, placements),
                                number_in(numbers_, call_python(order_of_, dtensor))};
    for (py::handle of : {dtensor, py::handle(local_of(dtensor))}) {
      const std::optional<tensor::Dims> sizes = sizes_of_tensor(of.ptr());
      if (!sizes.has_value()) return call_python(pieces_of_, dtensor);
      key.push_back(static_cast<int64_t>(sizes->size()));
      key.insert(key.end(), sizes->begin(), sizes->end());
    }
    const auto known = known_.find(key);
    if (known != known_.end()) return known->second;
    return known_.emplace(key, call_python(pieces_of_, dtensor)).first->second;
  }

 private:
  bool is_in_order(const py::object& mesh) {
    const auto known = meshes_.find(mesh.ptr());
    if (known != meshes_.end()) return known->second;
    return meshes_.emplace(mesh.ptr(), call_python(is_in_order_, mesh).cast<bool>()).first->second;
  }

  const py::object order_of_, pieces_of_, is_in_order_;
  std::map<PyObject*, bool> meshes_;
  py::dict numbers_;  // a number of each tuple of placements and of each order
  std::map<std::vector<int64_t>, py::object> known_;
};

}  // namespace

py::dict find_pieces(const py::dict& flat, const py::object& order_of, const py::object& pieces_of,
                     const py::object& is_in_order) {
  py::dict found;
  PiecesFinder finder(order_of, pieces_of, is_in_order);
  GilYield gil_yield;
  for (const auto& [key, value] : flat) {
    if (!is_dtensor(value)) continue;
    gil_yield.take();
    try {
      const py::object pieces = finder.find(value);
      if (!pieces.is_none()) found[key] = pieces;
    } catch (const std::exception&) {
      raise_for_value(py::str(key), value);
    }
  }
  return found;
}

}  // namespace bytecheckpoint::bridge
