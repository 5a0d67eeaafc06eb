// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "csrc/base/status.h"
#include "csrc/io/open_directory.h"

namespace bytecheckpoint::io {

/// Alignment that O_DIRECT asks of buffers, offsets and lengths on every file system we know.
inline constexpr int64_t kDirectAlignment = 4096;

/// One open file. The only place that knows EINTR, short transfers, O_DIRECT and fsync.
///
/// With `direct`, O_DIRECT is used where the file system has it and the transfer is aligned; anything else goes through
/// the page cache, silently: direct I/O is a matter of speed, not of correctness. Offsets are absolute; the file has no
/// position. `read_at` and `write_at` may be called from any thread, on disjoint ranges.
class File {
 public:
  File() = default;
  File(File&& other) noexcept { *this = std::move(other); }
  File& operator=(File&& other) noexcept;
  ~File();

  /// For reading. What `directory` leads to is the caller's business; `name` is a checkpoint's, and is not followed out
  /// of it nor through any symbolic link. \returns kCorrupt for such a name; kStorage for anything but a regular file.
  static base::Result<File> open(const std::string& directory, const std::string& name, bool direct);
  /// New, for writing and reading: O_CREAT | O_EXCL | O_NOFOLLOW. kStorage with EEXIST if anything is there.
  static base::Result<File> create(const std::string& path, bool direct);
  /// The same in a directory that is open, without O_DIRECT. \param name  Of one entry, and ours.
  static base::Result<File> create(const OpenDirectory& in, const std::string& name);

  /// Writes all of `size` bytes.
  base::Status write_at(const void* bytes, int64_t size, int64_t offset);
  /// Reads until `size` bytes or the end of the file. \returns the bytes read; kCorrupt if fewer than `wanted`.
  base::Result<int64_t> read_at(void* bytes, int64_t size, int64_t offset, int64_t wanted);
  /// `size` bytes at `offset`; kCorrupt if the file ends before.
  base::Result<std::string> read(int64_t offset, int64_t size);

  base::Result<int64_t> size() const;
  /// Asks for disk space behind the end without changing the size. File systems that cannot keep it free only say now
  /// whether they have it.
  base::Status reserve(int64_t bytes);
  base::Status truncate(int64_t bytes);
  /// A failure here is final: a second fsync may succeed without the data being on disk.
  base::Status sync();
  /// Hands what was written to the file system, as `close` does, and stays open: one that keeps it back until then, as
  /// network file systems do, says now that it was too much or is lost. Not durable: that takes `sync`.
  base::Status flush();
  /// The descriptor is gone in any case. A failure may be the only word that what was written is lost, unless it was
  /// synced or flushed: then it may be ignored.
  base::Status close();
  /// Forgets the descriptor without closing it: in a forked child, where somebody else has closed it.
  void disown() { fd_ = -1; }

  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  const std::string& path() const { return path_; }

 private:
  void stop_direct();

  std::string path_;
  int fd_ = -1;
  std::atomic<bool> direct_{false};
};

/// The whole of a small file, through the page cache. kStorage with ENOENT if it is absent.
base::Result<std::string> read_file(const std::string& directory, const std::string& name);

}  // namespace bytecheckpoint::io
