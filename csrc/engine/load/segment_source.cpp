// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/segment_source.h"

#include <algorithm>
#include <utility>

#include "csrc/base/bytes.h"

namespace bytecheckpoint::engine {

SourceFiles::SourceFiles(std::string directory, const format::Manifest& manifest)
    : directory_(std::move(directory)), manifest_(manifest) {}

base::Result<std::shared_ptr<const SourceFile>> SourceFiles::get(uint32_t file) {
  const base::MutexLock looking(looking_);
  if (std::shared_ptr<const SourceFile> known = find(file)) return known;
  BCP_ASSIGN_OR_RETURN(auto opened, SourceFile::open(directory_, manifest_, manifest_.files[file]));
  const base::MutexLock lock(mutex_);
  files_.emplace(file, opened);
  return opened;
}

std::shared_ptr<const SourceFile> SourceFiles::find(uint32_t file) {
  const base::MutexLock lock(mutex_);
  const auto found = files_.find(file);
  return found == files_.end() ? nullptr : found->second;
}

int64_t bytes_there(const planner::ReadSegment& segment, const SourceFile& file) {
  return std::min(segment.bytes, file.end_of_records - segment.offset);
}

SegmentSource::SegmentSource(SourceFiles* files, bool direct_io, const std::vector<planner::ReadSegment>& segments)
    : files_(files), direct_io_(direct_io), segments_(segments) {}

base::Result<std::optional<io::ReadRequest>> SegmentSource::next() {
  if (next_ == segments_.size()) return std::optional<io::ReadRequest>();
  const planner::ReadSegment& segment = segments_[next_];
  if (next_ == 0 || segments_[next_ - 1].file != segment.file) {
    BCP_ASSIGN_OR_RETURN(source_, files_->get(segment.file));
    BCP_ASSIGN_OR_RETURN(io::File file, source_->reopen(direct_io_));
    file_ = std::make_shared<io::File>(std::move(file));
  }
  if (segment.offset >= source_->end_of_records) return source_->behind_the_records(segment.offset);
  io::ReadRequest request;
  request.file = file_;
  request.offset = segment.offset;
  request.wanted = bytes_there(segment, *source_);
  request.size = base::align_up(request.wanted, io::kDirectAlignment);
  request.tag = next_++;
  return std::optional<io::ReadRequest>(std::move(request));
}

}  // namespace bytecheckpoint::engine
