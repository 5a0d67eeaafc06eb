// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/file_version.h"
#include "csrc/base/status.h"
#include "csrc/io/direct_io.h"
#include "csrc/io/object_store.h"
#include "csrc/io/open_directory.h"

namespace bytecheckpoint::io {

/// One open file, or object of a store (`object_store.h`). The only place that handles EINTR, short transfers, O_DIRECT
/// and fsync.
///
/// An object is either read, always in the version that was opened, or written, once and whole: it exists when `sync`
/// or `close` has succeeded.
///
/// With `direct`, O_DIRECT is used if the file system has it and the transfer is aligned. Any other transfer goes
/// through the page cache, without an error: direct I/O changes the speed, not the result. Whether a file system in
/// user space has it is found out by a transfer, once a process. There an unaligned transfer opens the file once more,
/// without O_DIRECT: such a server knows the flags of the open alone.
///
/// Offsets are absolute; the file has no position. Any thread may call `read_at` and `write_at`, on disjoint ranges.
/// Errors name operation, path, offset and sizes.
class File {
 public:
  File() = default;
  File(File&& other) noexcept { *this = std::move(other); }
  File& operator=(File&& other) noexcept;
  ~File();

  /// Opens a file for reading. `directory` is the caller's, and links in it are followed. `name` comes from a
  /// checkpoint: it may not lead out of the directory, nor through any symbolic link.
  /// \returns kCorrupt for such a name. kStorage, also for anything but a regular file.
  static base::Result<File> open(const std::string& directory, const std::string& name, bool direct);
  /// Creates a file for writing and reading (O_CREAT | O_EXCL | O_NOFOLLOW). \returns kStorage, with EEXIST if the name
  /// exists.
  static base::Result<File> create(const std::string& path, bool direct);
  /// The same in an open directory, without O_DIRECT. \param name  One entry of it; ours, so it is trusted.
  static base::Result<File> create(const OpenDirectory& in, const std::string& name);

  /// Writes all `size` bytes. \returns kStorage.
  base::Status write_at(const void* bytes, int64_t size, int64_t offset);
  /// Writes pieces of memory one behind another, in as few calls as their alignment allows. \returns kStorage.
  base::Status write_at(const std::vector<std::string_view>& pieces, int64_t offset);
  /// Writes bytes from memory of any alignment with O_DIRECT, if the file system has it: they go through a small
  /// aligned buffer, which costs less than pages in the cache. For bytes that nobody reads again soon. Afterwards
  /// the file is as if it had been created with `direct`. \returns kStorage.
  base::Status write_past_cache(std::string_view bytes, int64_t offset);
  /// Reads until `size` bytes or the end of the file. \returns the number of bytes read; kCorrupt if it is less than
  /// `wanted`; kStorage.
  base::Result<int64_t> read_at(void* bytes, int64_t size, int64_t offset, int64_t wanted);
  /// Reads `size` bytes at `offset`. \returns kCorrupt if the file ends before. kStorage.
  base::Result<std::string> read(int64_t offset, int64_t size);

  base::Result<int64_t> size() const;
  /// Returns what another content of this file would not have.
  base::Result<base::FileVersion> version() const;
  /// Whether nobody has removed the name of the file. Not for objects.
  bool has_name() const;
  /// Reserves disk space behind the end, without changing the size. File systems that cannot reserve are only asked
  /// whether they have the space now. \returns kStorage with ENOSPC or EDQUOT if there is none.
  base::Status reserve(int64_t bytes);
  /// Sets the size, and gives back space that was reserved behind it.
  base::Status truncate(int64_t bytes);
  /// Syncs the file (fsync). A failure is final: a second fsync may succeed although the data are not on disk.
  base::Status sync();
  /// Flushes the file as `close` does, but keeps it open. Network file systems keep writes back until then, and say
  /// only now that there is no room or the data are lost. Not durable: that takes `sync`.
  base::Status flush();
  /// Closes the file; the descriptor is gone in any case. A failure may be the only report that written data are lost.
  /// It may be ignored if the file was synced or flushed.
  base::Status close();
  /// Forgets the descriptor without closing it. For a forked child in which somebody else has closed it.
  void disown() { fd_ = buffered_ = -1; }

  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0 || is_object(); }
  /// Whether transfers that are aligned go past the page cache.
  bool is_direct() const { return direct_; }
  const std::string& path() const { return path_; }
  bool is_object() const { return store_ != nullptr || upload_ != nullptr; }

 private:
  static base::Result<File> open_object(const std::string& url, const std::string& name);
  void start_direct();
  /// \returns kStorage if the file cannot be opened once more where that is the only way.
  base::Status stop_direct();
  /// Returns the descriptor for a transfer. \param direct  `direct_` as the transfer began.
  int descriptor(bool direct) const { return direct || buffered_ < 0 ? fd_ : buffered_; }
  /// \returns 0, or the first errno.
  int close_all();
  base::Status finish_upload();
  /// Writes the first bytes of `pieces` in one call, as many as it takes. \returns how many; 0 if these pieces do not
  /// go together.
  base::Result<int64_t> write_together(const std::vector<std::string_view>& pieces, int64_t offset);
  /// Notes that bytes before `end` were written.
  void note_end(int64_t end);

  std::string path_;
  int fd_ = -1;
  int buffered_ = -1;  // on FUSE the same file without O_DIRECT; set before direct_ becomes false
  // Of an object that is read, or written.
  std::shared_ptr<ObjectStore> store_;
  std::string name_;
  ObjectStore::Object object_;
  std::shared_ptr<Upload> upload_;
  std::atomic<bool> direct_{false};
  std::atomic<int64_t> end_{-1};  // of what was written, of a file without reserved space; -1 if that is not known
};

/// Reads a whole small file through the page cache. \returns kStorage, with ENOENT if it is absent.
base::Result<std::string> read_file(const std::string& directory, const std::string& name);

}  // namespace bytecheckpoint::io
