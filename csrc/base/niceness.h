// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace bytecheckpoint::base {

/// Adds `steps` (0 to 19) to the niceness of the calling thread. This is final: lowering the niceness again needs
/// privileges. If the system refuses, nothing changes.
void add_niceness(int steps);

}  // namespace bytecheckpoint::base
