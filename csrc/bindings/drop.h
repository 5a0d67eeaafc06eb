// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "csrc/bindings/breath.h"
#include "csrc/bindings/gil.h"

// Freeing what is there of every tensor of a state takes milliseconds, for which other threads should not wait.

namespace bytecheckpoint::bindings {

/// Deletes what has nothing of Python in it, without the GIL, which the caller has.
struct DropUnlocked {
  template <class T>
  void operator()(T* object) const {
    const WithoutGil no_gil;
    delete object;
  }
};

/// Clears a list of values that have something of Python in them. Nobody else may know the list: the GIL is let go now
/// and then.
template <class T>
void drop_in_breaths(std::vector<T>* values) {
  Breath breath;
  while (!values->empty()) {
    values->pop_back();
    breath.take();
  }
}

}  // namespace bytecheckpoint::bindings
