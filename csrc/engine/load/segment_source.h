// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "csrc/base/mutex.h"
#include "csrc/base/status.h"
#include "csrc/engine/open/source_file.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/io/file.h"
#include "csrc/io/reader.h"
#include "csrc/planner/load_plan.h"

namespace bytecheckpoint::engine {

/// The data files of a load, by number. Each is opened and checked when it is first asked for. Thread-safe.
class SourceFiles {
 public:
  /// \param manifest  Of the checkpoint in `directory`; must outlive this.
  SourceFiles(std::string directory, const format::Manifest& manifest);

  /// Opens and checks a file, once. \returns the errors of `SourceFile::open`.
  base::Result<std::shared_ptr<const SourceFile>> get(uint32_t file);
  /// Returns null for a file that `get` has not opened. Does not wait for a thread that opens another file.
  std::shared_ptr<const SourceFile> find(uint32_t file);

 private:
  const std::string directory_;
  const format::Manifest& manifest_;
  base::Mutex looking_;  // held while a file is opened, so that each is opened once; locked before mutex_
  base::Mutex mutex_;
  std::unordered_map<uint32_t, std::shared_ptr<const SourceFile>> files_ BCP_GUARDED_BY(mutex_);
};

/// Returns how many bytes of a segment the file has: the last block of the records is short.
int64_t bytes_there(const planner::ReadSegment& segment, const SourceFile& file);

/// Hands out segments in order, as requests for a `Reader`. Opens each file when its first segment is due. Not
/// thread-safe.
class SegmentSource {
 public:
  /// \param segments  Ascending by file. They and `files` must outlive this. The tag of a request is the segment's
  /// position.
  SegmentSource(SourceFiles* files, bool direct_io, const std::vector<planner::ReadSegment>& segments);

  /// Returns the next request; nothing at the end. \returns kCorrupt for a segment behind the records, or an error of
  /// opening.
  base::Result<std::optional<io::ReadRequest>> next();

 private:
  SourceFiles* const files_;
  const bool direct_io_;
  const std::vector<planner::ReadSegment>& segments_;
  size_t next_ = 0;
  std::shared_ptr<const SourceFile> source_;  // the file of the segment before
  std::shared_ptr<io::File> file_;
};

}  // namespace bytecheckpoint::engine
