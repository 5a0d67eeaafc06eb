// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/stl.h>

#include "csrc/tensor/dims.h"

namespace pybind11::detail {

/// Converts any sequence of ints to Dims, and Dims to a list. Include it in every file whose bindings pass Dims: a
/// program may have only one caster for a type.
template <>
struct type_caster<bytecheckpoint::tensor::Dims> : list_caster<bytecheckpoint::tensor::Dims, int64_t> {};

}  // namespace pybind11::detail
