// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "csrc/base/status.h"
#include "csrc/format/archive_reader.h"
#include "csrc/format/zip_directory.h"

namespace bytecheckpoint::format {

/// `data.pkl` of an archive of torch.save. Views point into the reader's pieces.
struct PickleEntry {
  ZipDirectory directory;
  std::string_view folder;  // of all entries
  std::string_view pickle;
  bool has_crcs = true;  // false if the writer was told to compute none

  /// An entry of the same folder; nullptr if there is none, kCorrupt if there are two.
  base::Result<const ZipEntry*> find(std::string_view name) const { return directory.find(folder, name); }
};

/// Finds `data.pkl` and checks its CRC.
///
/// \returns nullopt for what is left to `torch.load`: compressed, of the other byte order, larger than
///   `max_pickle_bytes`. kUnsupported for what is no archive of torch.save; kCorrupt for a damaged one.
base::Result<std::optional<PickleEntry>> read_pickle_entry(ArchiveReader* archive, int64_t max_pickle_bytes);

/// The same of an archive that is all in memory, with nullopt for whatever torch.load would not take for an archive of
/// torch.save, or for a TorchScript program.
base::Result<std::optional<PickleEntry>> read_value_entry(ArchiveReader* archive, int64_t max_pickle_bytes);

}  // namespace bytecheckpoint::format
