// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/flatten.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <vector>

#include "csrc/bridge/dict_items.h"
#include "csrc/bridge/errors.h"
#include "csrc/bridge/gil_yield.h"
#include "csrc/bridge/recursion_guard.h"
#include "csrc/bridge/torch_tensor.h"

namespace bytecheckpoint::bridge {
namespace {

namespace py = pybind11;

using base::text;

constexpr const char* kWhere = " while flattening a state dict";

bool is_text(py::handle key) {
  return PyUnicode_CheckExact(key.ptr()) != 0;
}

std::string repr_of(py::handle key) {
  return py::repr(key).cast<std::string>();
}

/// Returns the keys of a dict, or of another Mapping; one like TensorDict iterates over something else.
py::list keys_of(py::handle mapping) {
  PyObject* keys = PyDict_CheckExact(mapping.ptr()) ? PyDict_Keys(mapping.ptr())
                                                    : take_gil([&] { return PyMapping_Keys(mapping.ptr()); });
  if (keys == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::list>(keys);
}

/// Returns the items of a Mapping that is no dict itself, as pairs.
py::list items_of(py::handle mapping) {
  PyObject* items = take_gil([&] { return PyMapping_Items(mapping.ptr()); });
  if (items == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::list>(items);
}

/// Whether a value is None, or containers of builtin types with nothing else in them.
bool is_nothing(py::handle value) {
  const RecursionGuard descent(kWhere);
  if (value.is_none()) return true;
  if (PyDict_Check(value.ptr())) {
    const auto dict = py::reinterpret_borrow<py::dict>(value);
    return std::all_of(dict.begin(), dict.end(), [](const auto& item) { return is_nothing(item.second); });
  }
  if (!PyList_Check(value.ptr()) && !PyTuple_Check(value.ptr()) && !PyAnySet_Check(value.ptr())) return false;
  const auto elements = py::reinterpret_borrow<py::iterable>(value);
  return std::all_of(elements.begin(), elements.end(), [](py::handle element) { return is_nothing(element); });
}

/// Returns the key of a mapping whose text is `step`; `step` itself if there is none.
py::object key_with_text(py::handle mapping, py::handle step) {
  for (const py::handle key : keys_of(mapping)) {
    if (py::str(key).equal(step)) return py::reinterpret_borrow<py::object>(key);
  }
  return py::reinterpret_borrow<py::object>(step);
}

class Flattener {
  struct KnownList {
    py::object list;  // kept alive, so that no other object gets its address
    bool is_terminal;
  };

 public:
  explicit Flattener(py::handle state_dict) : own_root_(state_dict) {}

  void enter_mapping(py::handle mapping) {
    const RecursionGuard descent(kWhere);
    check_keys(mapping);
    const auto visit = [this](py::handle key, py::handle value) { visit_at(py::str(key), key, py::str(key), value); };
    if (PyDict_CheckExact(mapping.ptr())) return for_each_item(mapping, visit);
    for (const py::handle item : items_of(mapping)) {
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
    return found->second && !is_object_without_items(value);
  }

  /// Whether a Mapping has no items, but attributes with something in them: it is stored as an object then, as it would
  /// be lost otherwise.
  bool is_object_without_items(py::handle mapping) const {
    if (!items_of(mapping).empty()) return false;
    PyObject* state = take_gil([&] { return PyObject_CallOneArg(state_of_object_.ptr(), mapping.ptr()); });
    if (state == nullptr) throw py::error_already_set();
    return !is_nothing(py::reinterpret_steal<py::object>(state));
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

  /// Refuses keys of one mapping that a checkpoint cannot tell apart, and keys that no load would find.
  void check_keys(py::handle mapping) {
    const py::list keys = keys_of(mapping);
    if (std::all_of(keys.begin(), keys.end(), is_text)) return;
    py::dict by_text;
    for (const py::handle key : keys) {
      const py::str text_of_key(key);
      if (!is_text(key)) check_text(key, text_of_key.cast<std::string>());
      if (by_text.contains(text_of_key)) {
        const py::object other = by_text[text_of_key];
        refuse(text("two keys of ", place(), " have the text ", repr_of(text_of_key), ": ", repr_of(other), " of type ",
                    Py_TYPE(other.ptr())->tp_name, " and ", repr_of(key), " of type ", Py_TYPE(key.ptr())->tp_name,
                    "; a checkpoint keeps the text of a key, so it cannot tell them apart: rename one of them"));
      }
      by_text[text_of_key] = key;
    }
  }

  /// Refuses a key whose text is made of what changes: another process, or a later step, has another text.
  void check_text(py::handle key, const std::string& text_of_key) {
    const char* const why = is_tensor(key.ptr())                              ? "the elements of a tensor"
                            : text_of_key.find(" at 0x") != std::string::npos ? "an address in memory"
                                                                              : nullptr;
    if (why == nullptr) return;
    refuse(text("a key of ", place(), " is of type ", Py_TYPE(key.ptr())->tp_name, ", whose text has ", why,
                ": a checkpoint keeps the text of a key, so no load would find it; use names or numbers, such as those "
                "of optimizer.state_dict()"));
  }

  [[noreturn]] static void refuse(const std::string& message) { raise_as("InvalidPlanError", message); }

  /// Returns where the traversal is, as Python would write it.
  std::string place() const {
    std::string all = "state_dict";
    for (const py::handle key : own_keys_) all += text("[", repr_of(key), "]");
    return all;
  }

  /// Returns the place of a leaf that was visited, as Python would write it.
  std::string place_of(const py::tuple& path) const {
    std::string all = "state_dict";
    py::object at = py::reinterpret_borrow<py::object>(own_root_);
    for (const py::handle step : path) {
      const py::object key = is_text(step) ? key_with_text(at, step) : py::reinterpret_borrow<py::object>(step);
      all += text("[", repr_of(key), "]");
      at = at[key];
    }
    return all;
  }

  void visit_at(const py::str& text, py::handle own_key, py::object step, py::handle value) {
    const py::str outer = name_;
    name_ = path_.empty() ? text : concat(concat(outer, dot_), text);
    path_.push_back(std::move(step));
    own_keys_.push_back(own_key);
    if (is_mapping(value)) {
      enter_mapping(value);
    } else if (is_terminal(value)) {
      add_leaf(value);
    } else {
      const RecursionGuard descent(kWhere);
      Py_ssize_t position = 0;
      for (const py::handle entry : py::reinterpret_borrow<py::list>(value)) {
        const py::int_ number(position++);
        visit_at(py::str(py::handle(number)), number, number, entry);
      }
    }
    own_keys_.pop_back();
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
      // The end is the text of DCP's own error.
      refuse(text("two values of the state have the key ", repr_of(name_), ": ",
                  place_of(flat_.mappings[name_].cast<py::tuple>()), " and ", place(),
                  "; the key of a value is its path with dots, so rename one of them (duplicated flatten key ",
                  name_.cast<std::string>(), ")"));
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

  const py::handle own_root_;
  const py::object mapping_class_ = py::module_::import("collections.abc").attr("Mapping");
  const py::object state_of_object_ = py::module_::import("builtins").attr("object").attr("__getstate__");
  const py::str dot_{"."};
  std::unordered_map<PyTypeObject*, bool> mappings_;  // whether a type is a Mapping, for each type seen
  std::unordered_map<PyObject*, KnownList> lists_;    // lists seen: each is looked at once, wherever it is
  FlatState flat_;
  py::str name_;
  std::vector<py::object> path_;
  std::vector<py::handle> own_keys_;  // the keys of the path as they are in the state; their containers keep them alive
  GilYield gil_yield_;
};

}  // namespace

FlatState flatten_state_dict(py::handle state_dict) {
  Flattener flattener(state_dict);
  flattener.enter_mapping(state_dict);
  return flattener.take();
}

}  // namespace bytecheckpoint::bridge
