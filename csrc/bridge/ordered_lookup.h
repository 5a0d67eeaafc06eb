// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace bytecheckpoint::bridge {

/// Looks up values of a dict by keys that are mostly the very objects in the dict, in its order: those of a state that
/// was read from it. Then no hash table is searched, which would miss the cache several times a key.
///
/// The dict may change between calls: what is returned is always what the dict holds now. Needs the GIL.
class OrderedLookup {
 public:
  /// \param dict  A dict, which outlives this object.
  explicit OrderedLookup(pybind11::handle dict) : dict_(dict.ptr()), is_plain_(PyDict_CheckExact(dict.ptr()) != 0) {}

  /// Returns the value under `key`, borrowed; nullptr without one. Raises what comparing keys raises.
  PyObject* find(PyObject* key) {
    PyObject *next = nullptr, *value = nullptr;
    for (int tries = 0; is_plain_ && tries < kMostTries; ++tries) {
      if (PyDict_Next(dict_, &position_, &next, &value) == 0) {
        position_ = 0;
        break;
      }
      if (next == key) return value;
    }
    value = PyDict_GetItemWithError(dict_, key);
    if (value == nullptr && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
    return value;
  }

 private:
  // Some entries of a state, like objects between its tensors, are not asked for.
  static constexpr int kMostTries = 8;

  PyObject* const dict_;
  const bool is_plain_;  // subclasses may have an order of their own
  Py_ssize_t position_ = 0;
};

}  // namespace bytecheckpoint::bridge
