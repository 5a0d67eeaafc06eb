// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::staging {

/// Copies bytes [begin, end) of a row-major chunk from strided memory to a window.
///
///     memory   |row 0 |......|row 1 |......|row 2 |        any strides; holds the whole chunk
///     chunk    |row 0 |row 1 |row 2 |                      row-major: bytes 0 to the end
///     window       [begin    end)                          the part of it that is copied
///
/// \param runs        Of the box that covers the whole chunk, with the strides of `memory`.
/// \param begin, end  Bytes of the chunk, on element boundaries.
/// \param window      Receives end - begin bytes. Changes nothing but `window`; any number of threads may copy to
/// disjoint windows.
void gather_window(const tensor::BoxRuns& runs, const uint8_t* memory, int64_t begin, int64_t end, uint8_t* window);

/// The reverse: copies those bytes of `window`, which holds bytes [begin, end) of the chunk, that belong to the box of
/// `runs`. `memory` points at the first element of the box. Windows may cut the box anywhere on element boundaries.
void scatter_window(const tensor::BoxRuns& runs, const uint8_t* window, int64_t begin, int64_t end, uint8_t* memory);

}  // namespace bytecheckpoint::staging
