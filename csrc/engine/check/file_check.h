// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/mutex.h"
#include "csrc/base/status.h"
#include "csrc/engine/open/source_file.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::engine {

/// One fault that a verification has found.
struct Problem {
  std::string file;     // name in the directory
  std::string section;  // "metadata", "file", "header", "records", "block table or trailer"
  int64_t offset = 0;   // the first byte in doubt, and how many there are; -1: not known
  int64_t bytes = -1;
  std::vector<std::string> fqns;  // whose records have bytes there
  std::string message;
};

inline constexpr size_t kMaxProblems = 1000;

/// Verifies one data file, segment by segment, in any order and from any threads. Each segment is looked at once.
///
/// The CRC of each block is computed once. The CRC of a tensor, which stock readers use, is combined from those of its
/// whole blocks, and only the partial blocks at its ends are read for the CRC again:
///
///     blocks    |   0   |   1   |   2   |   3   |   4   |
///     record           |head|elements               |tail|
///     CRC                   |sum|   2   |   3   |sum|         combined, then compared with the CRC in the tail
///
/// Head and tail, the archive around the elements, are compared when their segment is looked at, so no byte is read
/// twice.
class FileCheck {
 public:
  /// A record of the file, and the item that it belongs to.
  struct Record {
    const format::Item* item;
    const format::Chunk* chunk;
  };

  /// \param entry, records  Of a manifest that must outlive this.
  FileCheck(const format::FileEntry& entry, std::vector<Record> records);

  /// Opens the file. Call it first, and in one thread. If the trailer or the block table is damaged, or the file is
  /// missing, that is a problem to report, and the file has no segments to read.
  /// \returns only what is no damage, like kUnsupported. Ok otherwise.
  base::Status open(const std::string& directory, const format::Manifest& manifest, bool direct_io);

  const format::FileEntry& entry() const { return entry_; }
  /// Null if there is nothing to read.
  const std::shared_ptr<io::File>& file() const { return file_; }
  int64_t end_of_records() const { return source_ == nullptr ? 0 : source_->end_of_records; }

  /// Verifies `size` bytes at `offset`, a multiple of the block size. The call for the last segment also concludes
  /// about all records. Any thread.
  void look_at(int64_t offset, int64_t size, const uint8_t* bytes);
  /// Notes that a segment could not be read. Nothing is concluded about the records then. Any thread.
  void miss(const base::Status& failure);
  /// Whether a segment could not be read. Any thread.
  bool has_missed();

  /// Returns the problems by offset, kMaxProblems at most. Call it when all segments were looked at.
  std::vector<Problem> take_problems();

 private:
  /// The CRC of a stretch of the elements of record number `record`.
  struct PartCrc {
    size_t record;
    int64_t offset;
    int64_t bytes;
    uint32_t crc;
  };
  /// A part of what stands behind the elements.
  struct Tail {
    size_t record;
    int64_t offset;
    std::string bytes;
  };
  /// What one segment has shown, or all of them together.
  struct Seen {
    std::vector<PartCrc> part_crcs;
    std::vector<Tail> tails;
    std::vector<size_t> odd;  // records with a wrong head or extent
  };

  int64_t begin_of(size_t record) const { return records_[record].chunk->record.offset; }
  int64_t end_of(size_t record) const { return begin_of(record) + records_[record].chunk->record.bytes; }
  /// Returns the first record that may have bytes at or behind `offset`.
  size_t first_record_at(int64_t offset) const;

  bool check_blocks(int64_t offset, int64_t size, const uint8_t* bytes);
  Problem block_problem(int64_t offset, int64_t size, std::string message) const;
  Seen see(int64_t offset, int64_t size, const uint8_t* bytes) const;
  uint32_t crc_of(int64_t from, int64_t to, int64_t offset, const uint8_t* bytes) const;
  void check_header(const uint8_t* bytes, int64_t size);
  void conclude() BCP_REQUIRES(mutex_);
  void add(Problem problem) BCP_REQUIRES(mutex_);

  const format::FileEntry& entry_;
  std::vector<Record> records_;     // by offset
  std::vector<int64_t> last_ends_;  // the furthest end of any record up to this one; ascends even if records overlap
  std::shared_ptr<const SourceFile> source_;
  std::shared_ptr<io::File> file_;
  base::Mutex mutex_;
  int64_t bytes_left_ BCP_GUARDED_BY(mutex_) = 0;
  bool has_missed_ BCP_GUARDED_BY(mutex_) = false;
  Seen seen_ BCP_GUARDED_BY(mutex_);
  std::vector<Problem> problems_ BCP_GUARDED_BY(mutex_);
};

}  // namespace bytecheckpoint::engine
