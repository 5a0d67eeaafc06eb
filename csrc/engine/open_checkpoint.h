// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/base/status.h"
#include "csrc/engine/names.h"
#include "csrc/format/manifest.h"

namespace bytecheckpoint::engine {

struct OpenOptions {
  Scope scope;                    // whose commit mark to read
  bool check_pickle = false;      // also the part of ours that only stock readers use
  bool accept_rewritten = false;  // take the pickle for the truth where our files lost their manifest
};

/// The bytes of a commit mark. \returns kNotFound without one; kStorage.
base::Result<std::string> read_mark(const std::string& directory, Scope scope);
/// Why the mark at `path` could not be opened: kNotFound where nothing is there, otherwise `status`.
base::Status mark_failure(base::Status status, const std::string& path);
/// What `open_checkpoint` makes of them.
base::Result<format::Manifest> decode_mark(const std::string& directory, const std::string& bytes,
                                           const OpenOptions& options);

/// Reads and checks the manifest of the checkpoint in `directory`, or what the pickle of another writer says. Nothing
/// of a pickle is run.
///
/// \returns kNotFound without a commit mark; kCorrupt for one that is damaged, also where our own trailer is missing
/// but our files are there: losing the trailer must not lose the checks; kUnsupported for a foreign one that asks for
/// more than data; kVersion; kStorage.
base::Result<format::Manifest> open_checkpoint(const std::string& directory, const OpenOptions& options = {});

}  // namespace bytecheckpoint::engine
