// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind.h"

#include "csrc/bridge/buffer_view.h"
#include "csrc/bridge/errors.h"
#include "csrc/bridge/standard_values.h"
#include "csrc/bridge/tree_caster.h"
#include "csrc/format/pickle/pickle_memo.h"
#include "csrc/format/torch/builtin_archive.h"
#include "csrc/format/torch/standard_pickle.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

py::object dump_builtin(py::handle value) {
  // Leaves room for the protocol and STOP.
  const auto tree = try_tree_from_python(value, format::kMaxBuiltinPickleBytes - 3);
  if (!tree.has_value()) return py::none();
  return py::bytes(format::encode_builtin_archive(*tree));
}

py::object load_builtin(py::handle buffer) {
  const BufferView contents(buffer);
  const auto tree = value_or_raise(format::decode_builtin_archive(contents.bytes()));
  if (!tree.has_value()) return py::none();
  return py::make_tuple(tree_to_python(*tree));
}

py::object load_standard(py::handle buffer) {
  const BufferView contents(buffer);
  const auto archive = value_or_raise(format::read_standard_archive(contents.bytes()));
  if (!archive.has_value()) return py::none();
  const auto value = standard_to_python(*archive, contents.bytes());
  if (!value.has_value()) return py::none();
  return py::make_tuple(*value);
}

bool is_standard(py::handle buffer) {
  const BufferView contents(buffer);
  const auto archive = format::read_standard_archive(contents.bytes());
  return archive.is_ok() && archive.value().has_value();
}

void check_memo(py::handle buffer, int max_pickles) {
  const BufferView contents(buffer);
  raise_if_error(format::check_memo(contents.bytes(), max_pickles));
}

}  // namespace

void bind_builtin(py::module_& m) {
  m.def("dump_builtin", &dump_builtin, py::arg("value"));
  m.def("load_builtin", &load_builtin, py::arg("buffer"));
  m.def("load_standard", &load_standard, py::arg("buffer"));
  m.def("is_standard", &is_standard, py::arg("buffer"));
  m.def("check_memo", &check_memo, py::arg("buffer"), py::arg("max_pickles"));
}

}  // namespace bytecheckpoint::bindings
