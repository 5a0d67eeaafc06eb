// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

// While the interpreter shuts down, Python ends a daemon thread that wants the GIL by `pthread_exit`, which unwinds its
// stack. In a destructor, or through a noexcept function, that aborts the process. Here such a thread sleeps until the
// process ends, as in Python 3.14.

namespace bytecheckpoint::bridge {

/// Runs `take`, which takes the GIL, or runs Python, which releases it and takes it again. Does not return if the
/// interpreter is shutting down.
template <class Take>
auto take_gil(Take take) noexcept {
  try {
    return take();
  } catch (abi::__forced_unwind&) {
    for (;;) ::pause();
  }
}

/// Whether `value` is an instance of `type`, whose metaclass may say so in Python, as that of an abstract class does.
inline bool is_instance(pybind11::handle value, pybind11::handle type) {
  const int answer = take_gil([&] { return PyObject_IsInstance(value.ptr(), type.ptr()); });
  if (answer < 0) throw pybind11::error_already_set();
  return answer != 0;
}

/// Releases the GIL, which the caller must have, for as long as it lives.
class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    take_gil([this] { PyEval_RestoreThread(thread_); });
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* thread_;
};

/// Takes the GIL, in any thread, for as long as it lives.
class WithGil {
 public:
  WithGil() : before_(take_gil([] { return PyGILState_Ensure(); })) {}
  ~WithGil() { PyGILState_Release(before_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE before_;
};

}  // namespace bytecheckpoint::bridge
