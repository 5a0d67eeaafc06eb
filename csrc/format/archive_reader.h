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

/// kCorrupt: `archive: message`.
base::Status corrupt_archive(const std::string& message);

/// Looks at parts of one archive. Of one that has to be read it keeps what it read: its two ends answer nearly every
/// question.
class ArchiveReader {
 public:
  /// \param bytes  Of the archive, >= 0.
  /// \param read   Must outlive the reader.
  ArchiveReader(int64_t bytes, const ReadBytes& read) : bytes_(bytes), read_(&read) {}
  /// \param archive  All of it; must outlive the reader.
  explicit ArchiveReader(std::string_view archive)
      : bytes_(static_cast<int64_t>(archive.size())), in_memory_(archive.data()) {}

  int64_t bytes() const { return bytes_; }

  /// `size` bytes at `offset`, valid as long as the reader; kCorrupt, naming `what`, if they are not all inside.
  /// What has to be fetched is fetched with the page around it: headers and small entries stand close together.
  base::Result<std::string_view> view(int64_t offset, int64_t size, std::string_view what);
  /// The last `size` bytes, or all there are. A little more than that and the whole archive is fetched at once.
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
