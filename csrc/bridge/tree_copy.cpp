// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/tree_copy.h"

#include "csrc/bridge/dict_items.h"
#include "csrc/bridge/recursion_guard.h"

namespace bytecheckpoint::bridge {

namespace py = pybind11;

py::object TreeCopier::copy(py::handle value) {
  struct Forget {  // forgets all copies, however the call ends
    TreeCopier* copier;
    ~Forget() {
      copier->path_.clear();
      copier->copied_.clear();
    }
  } const forget{this};
  return copy_value(value);
}

py::object TreeCopier::copy_value(py::handle value) {
  PyObject* const v = value.ptr();
  const bool is_container = PyDict_CheckExact(v) || PyList_CheckExact(v) || PyTuple_CheckExact(v) ||
                            Py_TYPE(v) == reinterpret_cast<PyTypeObject*>(ordered_dict_.ptr());
  if (!is_container) return leaf_(value);
  const auto known = copied_.find(v);
  if (known != copied_.end()) return known->second.copy;
  py::object copied = copy_container(value);
  if (copies_once_) copied_.emplace(v, Copied{py::reinterpret_borrow<py::object>(value), copied});
  return copied;
}

py::object TreeCopier::copy_container(py::handle container) {
  PyObject* const v = container.ptr();
  if (PyDict_Check(v)) return copy_dict(container);
  const RecursionGuard descent(" while copying a state dict");
  const auto values = py::reinterpret_steal<py::tuple>(PySequence_Tuple(v));  // others may change the list meanwhile
  if (!values) throw py::error_already_set();
  py::list copied(values.size());
  for (size_t i = 0; i < values.size(); ++i) copied[i] = copy_at(py::int_(i), values[i]);
  return PyList_CheckExact(v) ? py::object(std::move(copied)) : py::tuple(copied);
}

py::object TreeCopier::copy_dict(py::handle dict) {
  const RecursionGuard descent(" while copying a state dict");
  py::object copied = py::reinterpret_borrow<py::object>(py::type::of(dict))();
  for_each_item(dict, [&](py::handle key, py::handle value) {
    const py::object copy = copy_at(py::reinterpret_borrow<py::object>(key), value);
    if (PyObject_SetItem(copied.ptr(), key.ptr(), copy.ptr()) != 0) throw py::error_already_set();
  });
  return copied;
}

py::object TreeCopier::copy_at(py::object step, py::handle value) {
  path_.push_back(std::move(step));
  py::object copied = copy_value(value);
  path_.pop_back();
  return copied;
}

std::string TreeCopier::path() const {
  std::string joined;
  for (const py::object& step : path_) joined += (joined.empty() ? "" : ".") + py::str(step).cast<std::string>();
  return joined;
}

}  // namespace bytecheckpoint::bridge
