// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/flatten.h"

#include <unordered_map>
#include <vector>

#include "csrc/bridge/dict_items.h"
#include "csrc/bridge/gil_yield.h"
#include "csrc/bridge/recursion_guard.h"
#include "csrc/bridge/torch_tensor.h"

namespace bytecheckpoint::bridge {
namespace {

namespace py = pybind11;

constexpr const char* kWhere = " while flattening a state dict";

class Flattener {
  struct KnownList {
    py::object list;  // kept alive, so that no other object gets its address
    bool is_terminal;
  };

 public:
  void enter_mapping(py::handle mapping) {
    const RecursionGuard descent(kWhere);
    const auto visit = [this](py::handle key, py::handle value) { visit_at(py::str(key), py::str(key), value); };
    if (PyDict_CheckExact(mapping.ptr())) return for_each_item(mapping, visit);
    PyObject* items = take_gil([&] { return PyObject_CallMethod(mapping.ptr(), "items", nullptr); });
    if (items == nullptr) throw py::error_already_set();
    for (const py::handle item : py::reinterpret_steal<py::object>(items)) {
      const py::tuple pair(py::reinterpret_borrow<py::object>(item));
      visit(pair[0], pair[1]);
    }
  }

  FlatState take() { return std::move(flat_); }

 private:
  bool is_mapping(py::handle value) {
    if (PyDict_Check(value.ptr())) return true;
    const auto [found, is_new] = mappings_.try_emplace(Py_TYPE(value.ptr()), false);
    if (is_new) found->second = is_instance(value, mapping_class_);
    return found->second;
  }

  /// Whether the value is a leaf, and not entered.
  bool is_terminal(py::handle value) {
    if (is_mapping(value)) return false;
    if (!PyList_Check(value.ptr())) return true;
    const auto known = lists_.find(value.ptr());
    if (known != lists_.end()) return known->second.is_terminal;
    const bool is_terminal = has_leaves_only(py::reinterpret_borrow<py::list>(value));
    lists_.emplace(value.ptr(), KnownList{py::reinterpret_borrow<py::object>(value), is_terminal});
    return is_terminal;
  }

  bool has_leaves_only(const py::list& list) {
    const RecursionGuard descent(kWhere);
    for (const py::handle entry : list) {
      if (is_tensor(entry.ptr())) return false;
      if ((is_mapping(entry) || PyList_Check(entry.ptr())) && !is_terminal(entry)) return false;
    }
    return true;
  }

  void visit_at(const py::str& text, py::object step, py::handle value) {
    const py::str outer = name_;
    name_ = path_.empty() ? text : concat(concat(outer, dot_), text);
    path_.push_back(std::move(step));
    if (is_mapping(value)) {
      enter_mapping(value);
    } else if (is_terminal(value)) {
      add_leaf(value);
    } else {
      const RecursionGuard descent(kWhere);
      Py_ssize_t position = 0;
      for (const py::handle entry : py::reinterpret_borrow<py::list>(value)) {
        const py::int_ number(position++);
        visit_at(py::str(py::handle(number)), number, entry);
      }
    }
    path_.pop_back();
    name_ = outer;
  }

  void add_leaf(py::handle value) {
    py::tuple path(path_.size());
    for (size_t i = 0; i < path_.size(); ++i) path[i] = path_[i];
    PyObject_GC_UnTrack(path.ptr());  // it holds only text and numbers, which the next collection would find out, too
    const Py_ssize_t num_before = PyDict_GET_SIZE(flat_.values.ptr());
    set(flat_.values, value);
    // Looking first would cost as much as adding does.
    if (PyDict_GET_SIZE(flat_.values.ptr()) == num_before) {
      throw py::value_error("duplicated flatten key " + name_.cast<std::string>());
    }
    set(flat_.mappings, path);
    gil_yield_.take();
  }

  void set(const py::dict& of, py::handle value) const {
    if (PyDict_SetItem(of.ptr(), name_.ptr(), value.ptr()) != 0) throw py::error_already_set();
  }

  static py::str concat(const py::str& a, const py::str& b) {
    PyObject* joined = PyUnicode_Concat(a.ptr(), b.ptr());
    if (joined == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::str>(joined);
  }

  const py::object mapping_class_ = py::module_::import("collections.abc").attr("Mapping");
  const py::str dot_{"."};
  std::unordered_map<PyTypeObject*, bool> mappings_;  // whether a type is a Mapping, for each type seen
  std::unordered_map<PyObject*, KnownList> lists_;    // lists seen: each is looked at once, wherever it is
  FlatState flat_;
  py::str name_;
  std::vector<py::object> path_;
  GilYield gil_yield_;
};

}  // namespace

FlatState flatten_state_dict(py::handle state_dict) {
  Flattener flattener;
  flattener.enter_mapping(state_dict);
  return flattener.take();
}

}  // namespace bytecheckpoint::bridge
