// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "csrc/base/bytes.h"
#include "csrc/base/status.h"

namespace bytecheckpoint::engine {

/// 16 bytes from the kernel's generator: ids must differ between machines that start alike.
base::Result<base::Id> draw_id();

}  // namespace bytecheckpoint::engine
