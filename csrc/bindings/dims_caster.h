// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/stl.h>

#include "csrc/tensor/dims.h"

namespace pybind11::detail {

/// Dims from any sequence of ints, and to a list. Wherever bindings pass Dims, in every file: one meaning a program.
template <>
struct type_caster<bytecheckpoint::tensor::Dims> : list_caster<bytecheckpoint::tensor::Dims, int64_t> {};

}  // namespace pybind11::detail
