// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/stat.h>

#include <string>
#include <string_view>

namespace bytecheckpoint::io {

/// Whether a name is one that NFS (`.nfs...`) or FUSE (`.fuse_hidden...`) gives a file that is removed while somebody
/// has it open. It goes at the last close; if that machine dies before, it stays.
bool is_hidden_name(std::string_view name);

/// Whether a process, maybe on another machine, may still have such a file open: for an hour after it got the name.
bool may_be_held(const struct stat& hidden);

/// Whether `name` in `directory` is such a file that nobody can have open any more.
bool is_left_hidden(const std::string& directory, const std::string& name);

}  // namespace bytecheckpoint::io
