// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/archive/archive_reader.h"

#include <algorithm>
#include <utility>

#include "csrc/base/bytes.h"

namespace bytecheckpoint::format {

using base::Status;
using base::text;

Status corrupt_archive(const std::string& message) {
  return Status::make(base::Code::kCorrupt, "archive: " + message);
}

base::Result<std::string_view> ArchiveReader::view(int64_t offset, int64_t size, std::string_view what) {
  if (offset < 0 || size < 0 || offset > bytes_ || size > bytes_ - offset) {
    return corrupt_archive(
        text(what, ": ", size, " bytes at ", offset, " are outside the archive, which has ", bytes_, " bytes"));
  }
  if (read_ == nullptr) return std::string_view(in_memory_ + offset, static_cast<size_t>(size));
  for (const Piece& piece : pieces_) {
    const int64_t skipped = offset - piece.offset;
    const auto piece_bytes = static_cast<int64_t>(piece.bytes.size());
    if (skipped < 0 || skipped > piece_bytes || size > piece_bytes - skipped) continue;
    return std::string_view(piece.bytes).substr(static_cast<size_t>(skipped), static_cast<size_t>(size));
  }
  const int64_t begin = base::align_down(offset, kPageBytes);
  const int64_t wanted = std::min(std::max(offset - begin + size, kPageBytes), bytes_ - begin);
  BCP_ASSIGN_OR_RETURN(const std::string_view fetched, fetch(begin, wanted));
  return fetched.substr(static_cast<size_t>(offset - begin), static_cast<size_t>(size));
}

base::Result<std::string_view> ArchiveReader::tail(int64_t size) {
  const int64_t wanted = std::min(size, bytes_);
  if (read_ != nullptr && bytes_ - wanted <= kPageBytes && pieces_.empty()) {
    BCP_ASSIGN_OR_RETURN(const std::string_view all, fetch(0, bytes_));
    return all.substr(all.size() - static_cast<size_t>(wanted));
  }
  return view(bytes_ - wanted, wanted, "end");
}

base::Result<std::string_view> ArchiveReader::fetch(int64_t offset, int64_t size) {
  BCP_ASSIGN_OR_RETURN(std::string bytes, (*read_)(offset, size));
  if (bytes.size() != static_cast<size_t>(size)) {
    return corrupt_archive(text("read only ", bytes.size(), " of ", size, " bytes at ", offset));
  }
  pieces_.push_back({offset, std::move(bytes)});
  return std::string_view(pieces_.back().bytes);
}

}  // namespace bytecheckpoint::format
