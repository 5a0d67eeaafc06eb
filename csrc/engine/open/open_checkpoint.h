// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/base/status.h"
#include "csrc/engine/names.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::engine {

/// What to read, and how much of it to check.
struct OpenOptions {
  Scope scope;                    // the commit mark to read
  bool check_pickle = false;      // also check the pickle in our metadata, which only stock readers use
  bool accept_rewritten = false;  // if our manifest is gone but our data files are there, trust the pickle
};

/// The content of a commit mark, and the version of its file that has it.
struct Mark {
  std::string bytes;
  base::FileVersion version;
};

/// Reads all bytes of a commit mark. \returns kNotFound if there is none. kCorrupt for a large file that is no
/// metadata. kStorage.
base::Result<Mark> read_mark(const std::string& directory, Scope scope);
/// Returns what another commit mark of this name would not have: its length and its last bytes. Empty if there is none.
/// \returns kStorage.
base::Result<std::string> identity_of_mark(const std::string& directory, Scope scope);
/// Opens a commit mark as the server has it now. \returns kNotFound if there is none. What `io::File::open` returns.
base::Result<io::File> open_mark(const std::string& directory, Scope scope);
/// Decodes and checks a commit mark, as `open_checkpoint` does.
base::Result<format::Manifest> decode_mark(const std::string& directory, const Mark& mark, const OpenOptions& options);

/// Reads and checks the manifest of the checkpoint in `directory`. For the checkpoint of another writer it makes a
/// manifest from the pickle, as data: nothing in a pickle is ever run. Reads the commit mark; of the data files it
/// reads only some first bytes, and those only of checkpoints that are not ours. The versions of these files are noted,
/// so that no later reader takes others for them.
///
/// \returns kNotFound without a commit mark. kCorrupt for a damaged mark. Also kCorrupt if our trailer is missing but
/// data files of ours are there: losing the trailer must not switch the checks off (see `accept_rewritten`).
/// kUnsupported for another writer's mark that needs more than data. kChanged if another writer's mark was replaced
/// meanwhile. kVersion. kStorage.
base::Result<format::Manifest> open_checkpoint(const std::string& directory, const OpenOptions& options = {});

}  // namespace bytecheckpoint::engine
