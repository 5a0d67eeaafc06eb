// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::staging {

/// Copies bytes [begin, end) of a row-major chunk, gathered from the strided memory that holds the whole chunk.
///
/// \param runs    Of the box that covers the whole chunk, against the strides of `memory`.
/// \param begin, end  Bytes of the chunk, on element boundaries.
/// \param window  Receives end - begin bytes.
/// Pure over its arguments; any number of threads on disjoint windows.
void gather_window(const tensor::BoxRuns& runs, const uint8_t* memory, int64_t begin, int64_t end, uint8_t* window);

/// The reverse: `window` holds bytes [begin, end) of the chunk; those that belong to the box go to `memory`,
/// which points at the first element of the box. Windows may cut the box anywhere on element boundaries.
void scatter_window(const tensor::BoxRuns& runs, const uint8_t* window, int64_t begin, int64_t end, uint8_t* memory);

}  // namespace bytecheckpoint::staging
