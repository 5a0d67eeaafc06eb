// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <unordered_set>
#include <vector>

#include "csrc/base/status.h"

namespace bytecheckpoint::engine {

/// Returns the names of all data files that any commit mark in `directory` refers to.
///
/// \param listing  Names in the directory. Marks of single ranks are taken from it; `.metadata` is looked for in any
/// case.
/// Of a mark of ours it reads the list of files alone: every save looks, and the rest may have gigabytes.
/// \returns the error of `ManifestReader` or `open_checkpoint` if a mark is there and cannot be read; kNotFound if one
/// is listed and cannot be found: a network file system may say so of what is there.
base::Result<std::unordered_set<std::string>> named_files(const std::string& directory,
                                                          const std::vector<std::string>& listing);

}  // namespace bytecheckpoint::engine
