// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>

#include "csrc/base/status.h"

namespace bytecheckpoint::format {

/// Reads `size` bytes at `offset` of a record.
using ReadBytes = std::function<base::Result<std::string>(int64_t offset, int64_t size)>;

/// Makes a kCorrupt failure: `archive: message`.
base::Status corrupt_archive(const std::string& message);

/// Gives access to parts of one archive, which is in memory or has to be read.
///
/// An archive that has to be read is fetched in pieces, which the reader keeps: the pieces at both ends answer nearly
/// all requests. Not thread-safe.
class ArchiveReader {
 public:
  /// \param bytes  Length of the archive, >= 0.
  /// \param read  Must outlive the reader.
  ArchiveReader(int64_t bytes, const ReadBytes& read) : bytes_(bytes), read_(&read) {}
  /// \param archive  The whole archive; must outlive the reader.
  explicit ArchiveReader(std::string_view archive)
      : bytes_(static_cast<int64_t>(archive.size())), in_memory_(archive.data()) {}

  int64_t bytes() const { return bytes_; }

  /// Returns `size` bytes at `offset`, valid as long as the reader. A piece that has to be fetched is fetched with the
  /// page around it, because headers and small entries stand close together.
  /// \param what  Name of these bytes in the message of a failure.
  /// \returns kCorrupt if they do not all lie in the archive; else what `read` fails with.
  base::Result<std::string_view> view(int64_t offset, int64_t size, std::string_view what);
  /// Returns the last `size` bytes, or all bytes if there are fewer. Fetches the whole archive at once if it is only a
  /// little longer.
  base::Result<std::string_view> tail(int64_t size);

 private:
  static constexpr int64_t kPageBytes = 4096;

  struct Piece {
    int64_t offset;
    std::string bytes;
  };

  base::Result<std::string_view> fetch(int64_t offset, int64_t size);

  const int64_t bytes_;
  const ReadBytes* read_ = nullptr;
  const char* in_memory_ = nullptr;
  std::deque<Piece> pieces_;  // never moved: views point into them
};

}  // namespace bytecheckpoint::format
