// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/base/status.h"
#include "csrc/engine/names.h"

namespace bytecheckpoint::engine {

/// Looks for other live saves in `directory` that would get into the way of one of `scope`. For who holds a tmp of its
/// own there already: create first, look after, and of two that begin at once not both go on.
///
/// \param own_tmp    Name of the caller's tmp.
/// \param take_over  Removes their tmps instead; they can then no longer commit.
/// \returns kBusy, with the name of the first, if there is one.
base::Status refuse_live_saves(const std::string& directory, const std::string& own_tmp, Scope scope, bool take_over);

}  // namespace bytecheckpoint::engine
