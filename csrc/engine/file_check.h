// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/mutex.h"
#include "csrc/base/status.h"
#include "csrc/engine/source_file.h"
#include "csrc/format/manifest.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::engine {

/// One thing that is not as it was written.
struct Problem {
  std::string file;     // name in the directory
  std::string section;  // "metadata", "file", "header", "records", "block table or trailer"
  int64_t offset = 0;   // of the first byte in doubt, and how many; -1: not known
  int64_t bytes = -1;
  std::vector<std::string> fqns;  // of the records with bytes there
  std::string message;
};

inline constexpr size_t kMaxProblems = 1000;

/// One data file while it is verified: its segments, looked at once each, by any thread and in any order, and what they
/// add up to.
///
/// Each block is summed once: the sums of tensors, which stock readers go by, are joined from those of whole blocks.
/// What stands around the elements is compared as it goes by, so that no byte is read twice.
class FileCheck {
 public:
  /// A record and whose it is.
  struct Record {
    const format::Item* item;
    const format::Chunk* chunk;
  };

  /// \param entry, records  Of a manifest that outlives this.
  FileCheck(const format::FileEntry& entry, std::vector<Record> records);

  /// Opens the file. A file that cannot be believed is a problem, and has no segments. Before all else, in one thread.
  /// \returns what is no damage.
  base::Status open(const std::string& directory, const format::Manifest& manifest, bool direct_io);

  const format::FileEntry& entry() const { return entry_; }
  /// Null if nothing of it is to be read.
  const std::shared_ptr<io::File>& file() const { return file_; }
  int64_t end_of_records() const { return source_ == nullptr ? 0 : source_->end_of_records; }

  /// `size` bytes at `offset`, a multiple of the block size. The last call also looks at the whole.
  void look_at(int64_t offset, int64_t size, const uint8_t* bytes);
  /// A segment that could not be read. Nothing is said about the whole then.
  void miss(const base::Status& failure);
  bool has_missed();

  /// By offset; kMaxProblems at most. When all has been looked at.
  std::vector<Problem> take_problems();

 private:
  /// Of the elements of record number `record`: those at `offset`.
  struct Sum {
    size_t record;
    int64_t offset;
    int64_t bytes;
    uint32_t crc;
  };
  /// Of what stands behind its elements.
  struct Tail {
    size_t record;
    int64_t offset;
    std::string bytes;
  };
  struct Seen {
    std::vector<Sum> sums;
    std::vector<Tail> tails;
    std::vector<size_t> odd;  // records whose head or extent is not what it must be
  };

  int64_t begin_of(size_t record) const { return records_[record].chunk->record.offset; }
  int64_t end_of(size_t record) const { return begin_of(record) + records_[record].chunk->record.bytes; }
  /// The first record that may have bytes at `offset` or behind.
  size_t first_record_at(int64_t offset) const;

  bool check_blocks(int64_t offset, int64_t size, const uint8_t* bytes);
  Problem block_problem(int64_t offset, int64_t size, std::string message) const;
  Seen see(int64_t offset, int64_t size, const uint8_t* bytes) const;
  uint32_t sum_of(int64_t from, int64_t to, int64_t offset, const uint8_t* bytes) const;
  void check_header(const uint8_t* bytes, int64_t size);
  void conclude() BCP_REQUIRES(mutex_);
  void add(Problem problem) BCP_REQUIRES(mutex_);

  const format::FileEntry& entry_;
  std::vector<Record> records_;     // by offset
  std::vector<int64_t> last_ends_;  // the furthest end of a record up to this one: they ascend, whatever records say
  std::shared_ptr<const SourceFile> source_;
  std::shared_ptr<io::File> file_;
  base::Mutex mutex_;
  int64_t bytes_left_ BCP_GUARDED_BY(mutex_) = 0;
  bool has_missed_ BCP_GUARDED_BY(mutex_) = false;
  Seen seen_ BCP_GUARDED_BY(mutex_);
  std::vector<Problem> problems_ BCP_GUARDED_BY(mutex_);
};

}  // namespace bytecheckpoint::engine
