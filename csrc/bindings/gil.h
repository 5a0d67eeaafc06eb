// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

// While the interpreter ends, a daemon thread that wants the GIL is ended by `pthread_exit`, which unwinds its stack:
// in a destructor, or through what may not throw, that aborts the process. Here such a thread sleeps until the process
// is over, as Python 3.14 has it.

namespace bytecheckpoint::bindings {

/// Runs `take`, which takes the GIL, or has it and runs Python, which gives it away and takes it again. Does not return
/// if the interpreter is at its end.
template <class Take>
auto take_gil(Take take) noexcept {
  try {
    return take();
  } catch (abi::__forced_unwind&) {
    for (;;) ::pause();
  }
}

/// Without the GIL, which the caller has, as long as it lives.
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

/// With the GIL, in any thread, as long as it lives.
class WithGil {
 public:
  WithGil() : before_(take_gil([] { return PyGILState_Ensure(); })) {}
  ~WithGil() { PyGILState_Release(before_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE before_;
};

}  // namespace bytecheckpoint::bindings
