// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/bytes.h"

namespace bytecheckpoint::format {

/// The layout of a file that `torch.load` reads: a zip archive with a pickle, and the storages that the pickle names by
/// number. All offsets are known before the data is; only what stands behind a storage depends on its CRC:
///
///     | data.pkl | byteorder | version | header, padding | data/0 | descriptor, header, padding | data/1 | ...
///     |--------------- before(0) ----------------------|        |--------- before(1) ---------|
///
///     ... | data/n-1 | descriptor, directory |
///                    |------ before(n) ------|
///
/// Pure.
class TorchFileLayout {
 public:
  /// \param pickle         `data.pkl`.
  /// \param storage_bytes  Of each storage.
  TorchFileLayout(std::string_view pickle, const std::vector<int64_t>& storage_bytes);

  /// Where each storage begins, from the start of the file.
  const std::vector<int64_t>& storage_offsets() const { return storage_offsets_; }
  int64_t file_bytes() const { return file_bytes_; }
  /// Returns the bytes between storage `number - 1` and storage `number`; the first is behind the begin of the file,
  /// the last before its end.
  /// \param crcs  CRC-32 of each storage before.
  std::string before(size_t number, const std::vector<uint32_t>& crcs) const;

 private:
  /// An entry of the archive.
  struct Entry {
    std::string name;
    int64_t header_offset = 0;
    int64_t bytes = 0;
    uint32_t crc = 0;
  };

  void write_descriptor(size_t storage, uint32_t crc, base::ByteWriter* out) const;
  /// Writes the local header of a storage, and padding up to its first byte.
  void write_header(size_t storage, int64_t header_offset, base::ByteWriter* out) const;
  void write_directory(const std::vector<uint32_t>& crcs, int64_t offset, base::ByteWriter* out) const;

  std::string head_;          // before the header of the first storage
  std::vector<Entry> small_;  // in the head
  std::vector<Entry> storages_;
  std::vector<int64_t> storage_offsets_;
  int64_t file_bytes_ = 0;
};

}  // namespace bytecheckpoint::format
