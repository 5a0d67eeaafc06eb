// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "csrc/base/mutex.h"
#include "csrc/base/status.h"
#include "csrc/engine/source_file.h"
#include "csrc/format/manifest.h"
#include "csrc/io/file.h"
#include "csrc/io/reader.h"
#include "csrc/planner/load_plan.h"

namespace bytecheckpoint::engine {

/// Data files of a load by number, each looked at when it is first asked for. Safe from any thread.
class SourceFiles {
 public:
  /// \param manifest  Of the checkpoint in `directory`; outlives this.
  SourceFiles(std::string directory, const format::Manifest& manifest);

  base::Result<std::shared_ptr<const SourceFile>> get(uint32_t file);
  /// Null for one that has not been looked at. Does not wait for a thread that looks at another.
  std::shared_ptr<const SourceFile> find(uint32_t file);

 private:
  const std::string directory_;
  const format::Manifest& manifest_;
  base::Mutex looking_;  // held while a file is looked at, so that each is looked at once; taken before the other
  base::Mutex mutex_;
  std::unordered_map<uint32_t, std::shared_ptr<const SourceFile>> files_ BCP_GUARDED_BY(mutex_);
};

/// Bytes that a file has of a segment: the last block of the records is short.
int64_t bytes_there(const planner::ReadSegment& segment, const SourceFile& file);

/// Hands out segments in order as requests, each file opened when its first segment is due. One thread at a time.
class SegmentSource {
 public:
  /// \param segments  Ascending by file. They and `files` outlive this. A request's tag is the segment's place.
  SegmentSource(SourceFiles* files, bool direct_io, std::vector<const planner::ReadSegment*> segments);

  /// \returns nothing at the end.
  base::Result<std::optional<io::ReadRequest>> next();

 private:
  SourceFiles* const files_;
  const bool direct_io_;
  const std::vector<const planner::ReadSegment*> segments_;
  size_t next_ = 0;
  std::shared_ptr<const SourceFile> source_;  // of the segment before
  std::shared_ptr<io::File> file_;
};

}  // namespace bytecheckpoint::engine
