// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "csrc/bridge/gil.h"
#include "csrc/bridge/gil_yield.h"

// Freeing objects that exist for every tensor of a state takes milliseconds. Other Python threads should not wait for
// that.

namespace bytecheckpoint::bridge {

/// Deletes an object without the GIL. The object must hold nothing of Python; the caller must have the GIL.
struct DeleteWithoutGil {
  template <class T>
  void operator()(T* object) const {
    const WithoutGil no_gil;
    delete object;
  }
};

/// Clears a list of values that hold Python objects. Releases the GIL now and then, so nobody else may know the list.
template <class T>
void drop_in_breaths(std::vector<T>* values) {
  GilYield gil_yield;
  while (!values->empty()) {
    values->pop_back();
    gil_yield.take();
  }
}

}  // namespace bytecheckpoint::bridge
