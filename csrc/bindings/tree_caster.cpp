// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/tree_caster.h"

#include <string>

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using format::Tree;

Tree from_python(py::handle value, const std::string& where, int depth) {
  if (depth > format::kMaxTreeDepth) throw py::value_error(where + ": nested too deeply");
  Tree tree;
  PyObject* object = value.ptr();
  const auto child = [&](py::handle item, const std::string& step) {
    tree.children.push_back(from_python(item, where + "[" + step + "]", depth + 1));
  };
  if (object == Py_None) {
    tree.kind = Tree::Kind::kNone;
  } else if (PyBool_Check(object)) {
    tree.kind = object == Py_True ? Tree::Kind::kTrue : Tree::Kind::kFalse;
  } else if (PyLong_CheckExact(object)) {
    tree.kind = Tree::Kind::kInt;
    int overflow = 0;
    tree.integer = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow != 0) throw py::value_error(where + ": an int beyond 64 bits cannot be stored");
  } else if (PyFloat_CheckExact(object)) {
    tree.kind = Tree::Kind::kFloat;
    tree.real = PyFloat_AS_DOUBLE(object);
  } else if (PyUnicode_CheckExact(object)) {
    tree.kind = Tree::Kind::kString;
    tree.text = value.cast<std::string>();
  } else if (PyBytes_CheckExact(object)) {
    tree.kind = Tree::Kind::kBytes;
    tree.text = value.cast<std::string>();
  } else if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) {
    tree.kind = PyList_CheckExact(object) ? Tree::Kind::kList : Tree::Kind::kTuple;
    size_t index = 0;
    for (py::handle item : value) child(item, std::to_string(index++));
  } else if (PyDict_CheckExact(object)) {
    tree.kind = Tree::Kind::kDict;
    for (const auto& [key, item] : py::reinterpret_borrow<py::dict>(value)) {
      child(key, "key");
      child(item, py::repr(key).cast<std::string>());
    }
  } else {
    throw py::type_error(where + ": a " + Py_TYPE(object)->tp_name +
                         " cannot be stored; only None, bool, int, float, str, bytes, list, tuple and dict can");
  }
  return tree;
}

}  // namespace

Tree tree_from_python(py::handle value) {
  return from_python(value, "planner_data", 0);
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
