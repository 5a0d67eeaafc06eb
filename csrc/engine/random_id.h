// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "csrc/base/bytes.h"
#include "csrc/base/status.h"

namespace bytecheckpoint::engine {

/// Returns 16 random bytes from the kernel. A seeded generator would not do: ids must differ between machines that
/// start alike.
base::Result<base::Id> draw_id();

/// Returns an id for a save that begins now: a UUID of version 7, whose first 48 bits are the milliseconds since 1970.
/// Copies of a checkpoint keep it, while the times of their files are those of the copying.
base::Result<base::Id> draw_save_id();

}  // namespace bytecheckpoint::engine
