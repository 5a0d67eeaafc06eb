// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind_builtin.h"

#include "csrc/bindings/contents.h"
#include "csrc/bindings/errors.h"
#include "csrc/bindings/standard_values.h"
#include "csrc/bindings/tree_caster.h"
#include "csrc/format/builtin_archive.h"
#include "csrc/format/standard_pickle.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;

py::object dump_builtin(py::handle value) {
  // Room for the protocol and STOP.
  const auto tree = try_tree_from_python(value, format::kMaxBuiltinPickleBytes - 3);
  if (!tree.has_value()) return py::none();
  return py::bytes(format::encode_builtin_archive(*tree));
}

py::object load_builtin(py::handle buffer) {
  const Contents contents(buffer);
  const auto tree = value_or_raise(format::decode_builtin_archive(contents.bytes()));
  if (!tree.has_value()) return py::none();
  return py::make_tuple(tree_to_python(*tree));
}

py::object load_standard(py::handle buffer) {
  const Contents contents(buffer);
  const auto pickle = value_or_raise(format::read_standard_archive(contents.bytes()));
  if (!pickle.has_value()) return py::none();
  const auto value = standard_to_python(*pickle);
  if (!value.has_value()) return py::none();
  return py::make_tuple(*value);
}

bool is_standard(py::handle buffer) {
  const Contents contents(buffer);
  const auto pickle = format::read_standard_archive(contents.bytes());
  return pickle.is_ok() && pickle.value().has_value();
}

}  // namespace

void bind_builtin(py::module_& m) {
  m.def("dump_builtin", &dump_builtin, py::arg("value"));
  m.def("load_builtin", &load_builtin, py::arg("buffer"));
  m.def("load_standard", &load_standard, py::arg("buffer"));
  m.def("is_standard", &is_standard, py::arg("buffer"));
}

}  // namespace bytecheckpoint::bindings
