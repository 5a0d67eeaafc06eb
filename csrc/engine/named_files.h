// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include "csrc/base/status.h"

namespace bytecheckpoint::engine {

/// Names of all files that a commit mark in `directory` refers to.
///
/// \param listing  Names in the directory: `.metadata` is looked for in any case, marks of single ranks only here.
/// \returns what `open_checkpoint` fails with, if a mark is there and cannot be read.
base::Result<std::unordered_set<std::string>> named_files(const std::string& directory,
                                                          const std::vector<std::string>& listing);

}  // namespace bytecheckpoint::engine
