// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/tree_caster.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "csrc/format/torch/builtin_archive.h"

namespace bytecheckpoint::bridge {
namespace {

namespace py = pybind11;
using format::Tree;

/// Why a value cannot become a Tree, and where in it the reason is.
struct Refusal {
  PyObject* error = nullptr;  // borrowed: the class to raise
  std::string why;
  std::string steps;  // the path from the whole value to that place
};

/// Reads a value without running Python code, so that borrowed references stay valid.
class PythonReader {
 public:
  /// \param refusal  Filled if a read fails, unless null.
  explicit PythonReader(Refusal* refusal) : refusal_(refusal) {}
  /// Reads no more than this, and notes lists and dicts for `has_shared`.
  explicit PythonReader(int64_t max_pickle_bytes) : bytes_left_(max_pickle_bytes), is_limited_(true) {}

  bool read(PyObject* value, int depth) {
    if (depth > format::kMaxTreeDepth) return refuse(PyExc_ValueError, "nested too deeply");
    if (value == Py_None) return constant(Tree::Kind::kNone);
    if (PyBool_Check(value)) return constant(value == Py_True ? Tree::Kind::kTrue : Tree::Kind::kFalse);
    if (PyLong_CheckExact(value)) {
      int overflow = 0;
      const int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
      if (overflow != 0) return refuse(PyExc_ValueError, "an int beyond 64 bits cannot be stored");
      if (!take(Tree::Kind::kInt)) return false;
      format::encode_int(number, &out_);
      return true;
    }
    if (PyFloat_CheckExact(value)) {
      if (!take(Tree::Kind::kFloat)) return false;
      format::encode_float(PyFloat_AS_DOUBLE(value), &out_);
      return true;
    }
    if (PyUnicode_CheckExact(value)) return string(value);
    if (PyBytes_CheckExact(value)) {
      return text(Tree::Kind::kBytes, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value));
    }
    if (PyTuple_CheckExact(value)) return sequence(Tree::Kind::kTuple, value, depth);
    if (PyList_CheckExact(value)) return remember(value) && sequence(Tree::Kind::kList, value, depth);
    if (PyDict_CheckExact(value)) return remember(value) && dict(value, depth);
    if (refusal_ == nullptr) return false;
    return refuse(PyExc_TypeError, std::string("a ") + Py_TYPE(value)->tp_name +
                                       " cannot be stored; only None, bool, int, float, str, bytes, list, tuple and "
                                       "dict can");
  }

  /// Returns what was read.
  Tree finish() { return Tree::from_encoded(out_.take()); }

  /// Whether a list or dict was in several places.
  bool has_shared() {
    std::sort(containers_.begin(), containers_.end());
    return std::adjacent_find(containers_.begin(), containers_.end()) != containers_.end();
  }

 private:
  bool refuse(PyObject* error, std::string why) {
    if (refusal_ != nullptr) *refusal_ = {error, std::move(why), {}};
    return false;
  }

  bool take(Tree::Kind kind, int64_t text_bytes = 0) {
    if (is_limited_) bytes_left_ -= format::most_pickled_bytes(kind, text_bytes);
    return bytes_left_ >= 0;
  }

  bool constant(Tree::Kind kind) {
    if (!take(kind)) return false;
    format::encode_constant(kind, &out_);
    return true;
  }

  bool string(PyObject* value) {
    Py_ssize_t size = 0;
    const char* utf8 = PyUnicode_AsUTF8AndSize(value, &size);
    if (utf8 == nullptr) {
      PyErr_Clear();
      return refuse(PyExc_ValueError, "a str with surrogates cannot be stored");
    }
    return text(Tree::Kind::kString, utf8, size);
  }

  bool text(Tree::Kind kind, const char* bytes, Py_ssize_t size) {
    if (size > UINT32_MAX) return refuse(PyExc_ValueError, "a text of 4 GiB or more cannot be stored");
    if (!take(kind, size)) return false;
    format::encode_text(kind, {bytes, static_cast<size_t>(size)}, &out_);
    return true;
  }

  /// Notes a list or dict, and returns true. One that is in several places would come back as several objects.
  bool remember(PyObject* container) {
    if (is_limited_) containers_.push_back(container);
    return true;
  }

  bool sequence(Tree::Kind kind, PyObject* value, int depth) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
    if (!take(kind)) return false;
    format::encode_container(kind, static_cast<size_t>(size), &out_);
    PyObject** items = PySequence_Fast_ITEMS(value);
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!read(items[i], depth + 1)) return step([&] { return std::to_string(i); });
    }
    return true;
  }

  bool dict(PyObject* value, int depth) {
    if (!take(Tree::Kind::kDict)) return false;
    format::encode_container(Tree::Kind::kDict, 2 * static_cast<size_t>(PyDict_GET_SIZE(value)), &out_);
    PyObject *key, *item;
    Py_ssize_t position = 0;
    while (PyDict_Next(value, &position, &key, &item)) {
      if (!read(key, depth + 1)) return step([] { return std::string("key"); });
      if (!read(item, depth + 1)) return step([&] { return py::repr(key).cast<std::string>(); });
    }
    return true;
  }

  /// Returns false, after adding a step to the path of the refusal, if one is wanted.
  template <class Name>
  bool step(Name&& name) {
    if (refusal_ != nullptr) refusal_->steps = "[" + name() + "]" + refusal_->steps;
    return false;
  }

  Refusal* refusal_ = nullptr;
  int64_t bytes_left_ = 0;
  bool is_limited_ = false;
  std::vector<PyObject*> containers_;  // borrowed
  base::ByteWriter out_;
};

py::object read_node(format::TreeReader* in);

template <class Sequence>
py::object read_sequence(uint32_t size, format::TreeReader* in) {
  Sequence sequence(size);
  for (uint32_t i = 0; i < size; ++i) sequence[i] = read_node(in);
  return std::move(sequence);
}

/// Makes the next value, with its children.
py::object read_node(format::TreeReader* in) {
  const format::TreeNode node = in->next();
  switch (node.kind) {
    case Tree::Kind::kNone:
      return py::none();
    case Tree::Kind::kFalse:
      return py::bool_(false);
    case Tree::Kind::kTrue:
      return py::bool_(true);
    case Tree::Kind::kInt:
      return py::int_(node.integer);
    case Tree::Kind::kFloat:
      return py::float_(node.real);
    case Tree::Kind::kString:
      return py::str(node.text);
    case Tree::Kind::kBytes:
      return py::bytes(node.text);
    case Tree::Kind::kList:
      return read_sequence<py::list>(node.num_children, in);
    case Tree::Kind::kTuple:
      return read_sequence<py::tuple>(node.num_children, in);
    case Tree::Kind::kDict:
      break;
  }
  py::dict dict;
  for (uint32_t i = 0; i < node.num_children; i += 2) {
    const py::object key = read_node(in);
    dict[key] = read_node(in);
  }
  return dict;
}

}  // namespace

Tree tree_from_python(py::handle value) {
  Refusal refusal;
  PythonReader reader(&refusal);
  if (!reader.read(value.ptr(), 0)) {
    py::set_error(refusal.error, ("planner_data" + refusal.steps + ": " + refusal.why).c_str());
    throw py::error_already_set();
  }
  return reader.finish();
}

std::optional<Tree> try_tree_from_python(py::handle value, int64_t max_pickle_bytes) {
  PythonReader reader(max_pickle_bytes);
  if (!reader.read(value.ptr(), 0) || reader.has_shared()) return std::nullopt;
  return reader.finish();
}

py::object tree_to_python(const Tree& tree) {
  format::TreeReader in(tree);
  return read_node(&in);
}

}  // namespace bytecheckpoint::bridge
