// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/tree_caster.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "csrc/format/builtin_archive.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using format::Tree;

/// Why a value is no Tree, and where in it the reason stands.
struct Refusal {
  PyObject* error = nullptr;  // borrowed: the class to raise
  std::string why;
  std::string steps;  // from the whole value to the place
};

/// Reads a value without running Python code, so that borrowed references stay good.
class PythonReader {
 public:
  /// \param refusal  Filled when a read fails, unless null.
  explicit PythonReader(Refusal* refusal) : refusal_(refusal) {}
  /// Reads no more than this, and only what would keep its identities.
  explicit PythonReader(int64_t max_pickle_bytes) : bytes_left_(max_pickle_bytes), is_limited_(true) {}

  bool read(PyObject* value, int depth, Tree* out) {
    if (depth > format::kMaxTreeDepth) return refuse(PyExc_ValueError, "nested too deeply");
    if (value == Py_None) return take(Tree::Kind::kNone, out);
    if (PyBool_Check(value)) return take(value == Py_True ? Tree::Kind::kTrue : Tree::Kind::kFalse, out);
    if (PyLong_CheckExact(value)) {
      int overflow = 0;
      out->integer = PyLong_AsLongLongAndOverflow(value, &overflow);
      if (overflow != 0) return refuse(PyExc_ValueError, "an int beyond 64 bits cannot be stored");
      return take(Tree::Kind::kInt, out);
    }
    if (PyFloat_CheckExact(value)) {
      out->real = PyFloat_AS_DOUBLE(value);
      return take(Tree::Kind::kFloat, out);
    }
    if (PyUnicode_CheckExact(value)) return string(value, out);
    if (PyBytes_CheckExact(value)) {
      const Py_ssize_t size = PyBytes_GET_SIZE(value);
      if (!take(Tree::Kind::kBytes, out, size)) return false;
      out->text.assign(PyBytes_AS_STRING(value), static_cast<size_t>(size));
      return true;
    }
    if (PyTuple_CheckExact(value)) return take(Tree::Kind::kTuple, out) && sequence(value, depth, out);
    if (PyList_CheckExact(value)) return container(Tree::Kind::kList, value, out) && sequence(value, depth, out);
    if (PyDict_CheckExact(value)) return container(Tree::Kind::kDict, value, out) && dict(value, depth, out);
    if (refusal_ == nullptr) return false;
    return refuse(PyExc_TypeError, std::string("a ") + Py_TYPE(value)->tp_name +
                                       " cannot be stored; only None, bool, int, float, str, bytes, list, tuple and "
                                       "dict can");
  }

  /// Did a list or dict stand in several places?
  bool has_shared() {
    std::sort(containers_.begin(), containers_.end());
    return std::adjacent_find(containers_.begin(), containers_.end()) != containers_.end();
  }

 private:
  bool refuse(PyObject* error, std::string why) {
    if (refusal_ != nullptr) *refusal_ = {error, std::move(why), {}};
    return false;
  }

  bool take(Tree::Kind kind, Tree* out, int64_t text_bytes = 0) {
    out->kind = kind;
    if (is_limited_) bytes_left_ -= format::most_pickled_bytes(kind, text_bytes);
    return bytes_left_ >= 0;
  }

  /// So that nothing is allocated for children that could not all be taken.
  bool has_room(size_t num_children) const {
    constexpr int64_t kLeast = format::most_pickled_bytes(Tree::Kind::kNone);
    return !is_limited_ || static_cast<int64_t>(num_children) <= bytes_left_ / kLeast;
  }

  bool string(PyObject* value, Tree* out) {
    Py_ssize_t size = 0;
    const char* utf8 = PyUnicode_AsUTF8AndSize(value, &size);
    if (utf8 == nullptr) {
      PyErr_Clear();
      return refuse(PyExc_ValueError, "a str with surrogates cannot be stored");
    }
    if (!take(Tree::Kind::kString, out, size)) return false;
    out->text.assign(utf8, static_cast<size_t>(size));
    return true;
  }

  bool container(Tree::Kind kind, PyObject* value, Tree* out) {
    if (is_limited_) containers_.push_back(value);
    return take(kind, out);
  }

  bool sequence(PyObject* value, int depth, Tree* out) {
    const auto size = static_cast<size_t>(PySequence_Fast_GET_SIZE(value));
    if (!has_room(size)) return false;
    PyObject** items = PySequence_Fast_ITEMS(value);
    out->children.resize(size);
    for (size_t i = 0; i < size; ++i) {
      if (!read(items[i], depth + 1, &out->children[i])) return step([&] { return std::to_string(i); });
    }
    return true;
  }

  bool dict(PyObject* value, int depth, Tree* out) {
    const auto size = static_cast<size_t>(PyDict_GET_SIZE(value));
    if (!has_room(2 * size)) return false;
    out->children.resize(2 * size);
    PyObject *key, *item;
    Py_ssize_t position = 0;
    for (size_t i = 0; PyDict_Next(value, &position, &key, &item); i += 2) {
      if (!read(key, depth + 1, &out->children[i])) return step([] { return std::string("key"); });
      if (!read(item, depth + 1, &out->children[i + 1])) {
        return step([&] { return py::repr(key).cast<std::string>(); });
      }
    }
    return true;
  }

  /// False. Adds the step to the refused child, if anybody asks.
  template <class Name>
  bool step(Name&& name) {
    if (refusal_ != nullptr) refusal_->steps = "[" + name() + "]" + refusal_->steps;
    return false;
  }

  Refusal* refusal_ = nullptr;
  int64_t bytes_left_ = 0;
  bool is_limited_ = false;
  std::vector<PyObject*> containers_;  // borrowed
};

}  // namespace

Tree tree_from_python(py::handle value) {
  Tree tree;
  Refusal refusal;
  if (!PythonReader(&refusal).read(value.ptr(), 0, &tree)) {
    py::set_error(refusal.error, ("planner_data" + refusal.steps + ": " + refusal.why).c_str());
    throw py::error_already_set();
  }
  return tree;
}

std::optional<Tree> try_tree_from_python(py::handle value, int64_t max_pickle_bytes) {
  std::optional<Tree> tree(std::in_place);
  PythonReader reader(max_pickle_bytes);
  if (!reader.read(value.ptr(), 0, &*tree) || reader.has_shared()) tree.reset();
  return tree;
}

py::object tree_to_python(const Tree& tree) {
  switch (tree.kind) {
    case Tree::Kind::kNone:
      return py::none();
    case Tree::Kind::kFalse:
      return py::bool_(false);
    case Tree::Kind::kTrue:
      return py::bool_(true);
    case Tree::Kind::kInt:
      return py::int_(tree.integer);
    case Tree::Kind::kFloat:
      return py::float_(tree.real);
    case Tree::Kind::kString:
      return py::str(tree.text);
    case Tree::Kind::kBytes:
      return py::bytes(tree.text);
    case Tree::Kind::kList: {
      py::list list(tree.children.size());
      for (size_t i = 0; i < tree.children.size(); ++i) list[i] = tree_to_python(tree.children[i]);
      return list;
    }
    case Tree::Kind::kTuple: {
      py::tuple tuple(tree.children.size());
      for (size_t i = 0; i < tree.children.size(); ++i) tuple[i] = tree_to_python(tree.children[i]);
      return tuple;
    }
    case Tree::Kind::kDict:
      break;
  }
  py::dict dict;
  for (size_t i = 0; i + 1 < tree.children.size(); i += 2) {
    dict[tree_to_python(tree.children[i])] = tree_to_python(tree.children[i + 1]);
  }
  return dict;
}

}  // namespace bytecheckpoint::bindings
