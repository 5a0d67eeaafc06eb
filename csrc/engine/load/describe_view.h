// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string_view>

#include "csrc/engine/load/checkpoint_view.h"

namespace bytecheckpoint::engine {

/// Passes to `sink`, item by item, bytes that say where each element of a view comes from and what becomes of it. Two
/// views of one checkpoint have the same bytes if and only if reading them gives the same tensors under the same names,
/// stored in the same chunks, however the views were made.
void describe_view(const CheckpointView& view, const std::function<void(std::string_view)>& sink);

}  // namespace bytecheckpoint::engine
