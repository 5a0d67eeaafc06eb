// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "csrc/base/status.h"
#include "csrc/engine/export/element_reader.h"

namespace bytecheckpoint::bridge {

/// Calls Python in the middle of a conversion. An error that a function or a signal handler raises stays set until the
/// conversion has returned: throw `pybind11::error_already_set` then, if `raised()`.
class Callbacks {
 public:
  /// \param convert   Called with (name of the tensor, number of the first element, dtype, elements, wanted dtype,
  /// memory for the converted elements), or None.
  /// \param progress  Called with a number of bytes, or None.
  Callbacks(pybind11::object convert, pybind11::object progress)
      : convert_(std::move(convert)), progress_(std::move(progress)) {}

  /// Returns false after an error. Takes the GIL.
  bool progress(int64_t done);
  /// Takes the GIL. \returns kCancelled after an error.
  base::Status convert(const engine::ElementsToConvert& elements);
  bool raised() const { return raised_; }

  /// Makes a conversion call these functions. They must live until it has returned.
  template <class Options>
  void serve(Options* options) {
    options->progress = [this](int64_t done) { return progress(done); };
    options->convert = [this](const engine::ElementsToConvert& elements) { return convert(elements); };
  }

 private:
  void call(const pybind11::object& function, PyObject* arguments);

  const pybind11::object convert_, progress_;
  bool raised_ = false;
};

/// Calls Python with the bytes done and the bytes to do. An error that the function or a signal handler raises stays
/// set until the work has returned: throw `pybind11::error_already_set` then, if `raised()`.
class Progress {
 public:
  /// \param function  May be None.
  explicit Progress(const pybind11::object& function) : function_(function) {}

  /// Returns false after an error. Takes the GIL.
  bool operator()(int64_t done, int64_t total);
  bool raised() const { return raised_; }

 private:
  const pybind11::object& function_;
  bool raised_ = false;
};

}  // namespace bytecheckpoint::bridge
