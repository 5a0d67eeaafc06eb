// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "csrc/base/bytes.h"
#include "csrc/base/status.h"

namespace bytecheckpoint::engine {

/// Returns 16 random bytes from the kernel. A seeded generator would not do: ids must differ between machines that
/// start alike.
base::Result<base::Id> draw_id();

/// Returns an id for a save that begins now: a UUID of version 7, whose first 48 bits are the milliseconds since 1970.
/// Copies of a checkpoint keep it, while the times of their files are those of the copying. The ids of one process
/// ascend, also if its clock is set back meanwhile: they say which of its saves is the newest.
base::Result<base::Id> draw_save_id();

/// Has all later save ids of this process say that their saves began after `began_ms`, in milliseconds since 1970: when
/// the save began that this process has loaded, and goes on from, by whatever clock that was.
void draw_save_ids_after(int64_t began_ms);

}  // namespace bytecheckpoint::engine
