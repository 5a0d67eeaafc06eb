// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "csrc/base/bytes.h"
#include "csrc/base/status.h"

namespace bytecheckpoint::engine {

/// Returns 16 random bytes from the kernel. A seeded generator would not do: ids must differ between machines that
/// start alike.
base::Result<base::Id> draw_id();

}  // namespace bytecheckpoint::engine
