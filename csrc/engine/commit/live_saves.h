// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/base/status.h"
#include "csrc/engine/names.h"

namespace bytecheckpoint::engine {

/// Fails if another live save in `directory` would conflict with one of `scope`.
///
/// The caller must already hold a tmp of its own there. Every save creates first and looks afterwards, so of two that
/// begin at once not both go on.
///
/// \param own_tmp    Name of the caller's tmp.
/// \param take_over  Instead of failing, remove the tmps of live saves; they can then no longer commit.
/// \returns kBusy, naming the first tmp of a live save. kStorage.
base::Status refuse_live_saves(const std::string& directory, const std::string& own_tmp, Scope scope, bool take_over);

}  // namespace bytecheckpoint::engine
