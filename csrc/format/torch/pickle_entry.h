// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "csrc/base/status.h"
#include "csrc/format/archive/archive_reader.h"
#include "csrc/format/archive/zip_directory.h"

namespace bytecheckpoint::format {

/// The entry `data.pkl` of an archive of torch.save. Its views point into memory of the ArchiveReader.
struct PickleEntry {
  ZipDirectory directory;
  std::string_view folder;  // top folder of all entries
  std::string_view pickle;
  int64_t pickle_offset = 0;  // in the archive
  bool has_crcs = true;       // false if the writer was set to compute none

  /// Finds an entry of the same folder. \returns nullptr if there is none, kCorrupt if there are two.
  base::Result<const ZipEntry*> find(std::string_view name) const { return directory.find(folder, name); }
};

/// How much of an archive is read.
struct PickleLimits {
  int64_t pickle_bytes = 0;
  int64_t directory_bytes = kMaxDirectoryBytes;
};

/// Finds `data.pkl` and checks its CRC.
///
/// \param why_not  If not null, receives the reason for a nullopt.
/// \returns nullopt for an archive that is left to `torch.load`: a compressed one, one of the other byte order, or one
/// beyond the limits. kUnsupported for what is no archive of torch.save; kCorrupt for a damaged one.
base::Result<std::optional<PickleEntry>> read_pickle_entry(ArchiveReader* archive, const PickleLimits& limits,
                                                           std::string* why_not = nullptr);

/// Does the same for an archive that is in memory. Returns nullopt, not kUnsupported, for whatever torch.load would not
/// take for an archive of torch.save, and for TorchScript programs.
base::Result<std::optional<PickleEntry>> read_value_entry(ArchiveReader* archive, int64_t max_pickle_bytes);

}  // namespace bytecheckpoint::format
