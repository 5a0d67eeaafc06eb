// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/base/file_version.h"
#include "csrc/base/status.h"
#include "csrc/io/descriptor.h"
#include "csrc/io/direct_io.h"
#include "csrc/io/open_directory.h"
#include "csrc/io/reserved_space.h"

namespace bytecheckpoint::io {

/// One open file of a file system. The only place that handles EINTR, short transfers and O_DIRECT.
///
/// With `direct`, O_DIRECT is used if the file system has it and the transfer is aligned. Any other transfer goes
/// through the page cache, without an error: direct I/O changes the speed, not the result. Whether a file system in
/// user space has it is found out by a transfer, once a process.
///
/// Offsets are absolute; the file has no position. Any thread may call `read_at` and `write_at`, on disjoint ranges.
/// Errors name operation, path, offset and sizes.
class DiskFile {
 public:
  DiskFile() = default;
  /// The open file of a descriptor.
  explicit DiskFile(Descriptor descriptor) : descriptor_(std::move(descriptor)) {}

  /// Opens a file for reading. `directory` is the caller's, and links in it are followed. `name` comes from a
  /// checkpoint: it may not lead out of the directory, nor through any symbolic link.
  /// \returns kCorrupt for such a name. kStorage, also for anything but a regular file.
  static base::Result<DiskFile> open(const std::string& directory, const std::string& name, bool direct);
  /// Creates a file for writing and reading (O_CREAT | O_EXCL | O_NOFOLLOW). \returns kStorage, with EEXIST if the name
  /// exists.
  static base::Result<DiskFile> create(const std::string& path, bool direct);
  /// The same in an open directory, without O_DIRECT. \param name  One entry of it; ours, so it is trusted.
  static base::Result<DiskFile> create(const OpenDirectory& in, const std::string& name);

  /// Writes all `size` bytes. \returns kStorage.
  base::Status write_at(const void* bytes, int64_t size, int64_t offset);
  /// Writes pieces of memory one behind another, in as few calls as their alignment allows. \returns kStorage.
  base::Status write_at(const std::vector<std::string_view>& pieces, int64_t offset);
  /// Writes bytes from memory of any alignment with O_DIRECT, if the file system has it: they go through a small
  /// aligned buffer, which costs less than pages in the cache. For bytes that nobody reads again soon. Afterwards
  /// the file is as if it had been created with `direct`. \returns kStorage.
  base::Status write_past_cache(std::string_view bytes, int64_t offset);
  /// Reads until `size` bytes or the end of the file. \returns the number of bytes read. kStorage.
  /// \param wanted  A direct read that is cut short before so many bytes goes on through the page cache.
  base::Result<int64_t> read_at(void* bytes, int64_t size, int64_t offset, int64_t wanted);

  base::Result<int64_t> size() const;
  /// Returns what another content of this file would not have.
  base::Result<base::FileVersion> version() const;
  /// Whether nobody has removed the name of the file.
  bool has_name() const;

  /// See `ReservedSpace`.
  base::Status reserve(int64_t bytes) { return space_.reserve(descriptor_, bytes); }
  base::Status truncate(int64_t bytes) { return space_.truncate(descriptor_, bytes); }
  /// See `Descriptor`.
  base::Status sync() { return descriptor_.sync(); }
  base::Status flush() { return descriptor_.flush(); }
  base::Status close() { return descriptor_.close(); }
  void disown() { descriptor_.disown(); }
  int fd() const { return descriptor_.fd(); }
  bool is_open() const { return descriptor_.is_open(); }
  bool is_direct() const { return descriptor_.is_direct(); }
  const std::string& path() const { return descriptor_.path(); }

 private:
  /// Writes the first bytes of `pieces` in one call, as many as it takes. \returns how many; 0 if these pieces do not
  /// go together.
  base::Result<int64_t> write_together(const std::vector<std::string_view>& pieces, int64_t offset);

  Descriptor descriptor_;
  ReservedSpace space_;
};

}  // namespace bytecheckpoint::io
