// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Python.h>

#include <optional>

#include "csrc/base/status.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::bindings {

/// The host memory of a torch tensor. The only function that knows torch.
///
/// \param writable  The caller will write through the view: memory shared copy-on-write is made the tensor's own.
/// \returns kInvalidArgument unless `object` is a dense, strided CPU tensor without pending conjugation or negation,
/// of a dtype in the format; the message says what it is instead. Needs the GIL; the view does not keep the tensor
/// alive.
base::Result<tensor::StridedView> view_of_tensor(PyObject* object, bool writable);

/// The same for reading, and only of a torch.Tensor or Parameter itself: the elements of a subclass may mean something
/// else than its memory.
base::Result<tensor::StridedView> view_of_plain_tensor(PyObject* object);

/// Shape of any tensor, also one without memory here; nothing if `object` is none.
std::optional<tensor::Dims> sizes_of_tensor(PyObject* object);

}  // namespace bytecheckpoint::bindings
