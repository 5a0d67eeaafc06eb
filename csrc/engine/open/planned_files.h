// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::engine {

// Files of another writer have no ids, and are often written again under the same names. So whoever opens such a
// checkpoint notes the version of each file, and everybody who reads a file later finds out whether it is still that
// version. Otherwise a load that was planned from one checkpoint could read the elements of the next one.

/// Returns the version of a file, to note it. \param has_lasting_inodes  Of its file system; see `io/file_system.h`.
base::Result<base::FileVersion> version_to_note(const io::File& file, bool has_lasting_inodes);

/// A file that says which data files there are, or what is in them.
struct Description {
  std::string bytes;
  base::FileVersion version;
};
/// Reads all of such a file, and notes its version.
/// \param most_bytes  That are read. \param way_out  What to do if there are more, for the message.
/// \returns kUnsupported for more bytes; what `io::File::open` returns.
base::Result<Description> read_description(const std::string& directory, const std::string& name, int64_t most_bytes,
                                           std::string_view way_out = {});

/// Opens a file that a manifest names, to read what the manifest says of it; a packed one as what it unpacks to.
/// \returns kChanged if it is not the version that was noted; what `io::File::open` returns.
base::Result<io::File> open_planned(const std::string& directory, const format::FileEntry& planned, bool direct);

/// Looks at files of another writer's checkpoint once more: one may have been written in place while it was read.
/// \param directory  Of the data files. \param files  Numbers of those that were read.
/// \returns kChanged for one that is not the version that was noted, or is gone. kStorage.
base::Status check_unchanged(const std::string& directory, const format::Manifest& manifest,
                             const std::vector<uint32_t>& files);
/// The same for all files, and for the one that names them.
base::Status check_all_unchanged(const std::string& directory, const format::Manifest& manifest);
/// The same for the file that names the others alone.
base::Status check_description(const format::Manifest& manifest);

/// Returns a text that is another one for another version of any file of another writer's checkpoint.
std::string versions_of(const format::Manifest& manifest);

}  // namespace bytecheckpoint::engine
