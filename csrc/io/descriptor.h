// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <sys/types.h>

#include <atomic>
#include <string>
#include <utility>

#include "csrc/base/status.h"

namespace bytecheckpoint::io {

/// Opens a path (O_CLOEXEC); asks again if a signal came in between. \param directory  Of a relative path.
/// \returns the descriptor; -1 with errno.
int open_retrying(const char* path, int flags, mode_t mode, int directory = AT_FDCWD);

/// The descriptor of an open file, which it owns, and whether transfers through it are direct (O_DIRECT).
///
/// Direct I/O can be ended at any time. A file system in user space knows the flags of the open alone: there the file
/// is opened once more, without O_DIRECT, and both descriptors are kept.
///
/// Any thread may ask for a descriptor and end direct I/O. A closed file has nothing to sync, flush or close. Errors
/// name operation and path.
class Descriptor {
 public:
  Descriptor() = default;
  /// \param path  Of the file, for messages. \param direct  Whether `fd` was opened with O_DIRECT.
  Descriptor(int fd, std::string path, bool direct) : path_(std::move(path)), fd_(fd), direct_(direct) {}
  Descriptor(Descriptor&& other) noexcept { *this = std::move(other); }
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor() { close_all(); }

  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  const std::string& path() const { return path_; }

  /// Whether transfers that are aligned go past the page cache.
  bool is_direct() const { return direct_; }
  /// Returns the descriptor for a transfer. \param direct  `is_direct` as the transfer began.
  int for_transfer(bool direct) const { return direct || buffered_ < 0 ? fd_ : buffered_; }
  /// Makes transfers direct, if the file system has that.
  void start_direct();
  /// \returns kStorage if the file cannot be opened once more where that is the only way.
  base::Status stop_direct();
  /// Closes what was opened with O_DIRECT, where that is another descriptor. Only if nothing was transferred through
  /// it.
  void forget_direct();

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

 private:
  /// \returns 0, or the first errno.
  int close_all();

  std::string path_;
  int fd_ = -1;
  int buffered_ = -1;  // on FUSE the same file without O_DIRECT; set before direct_ becomes false
  std::atomic<bool> direct_{false};
};

}  // namespace bytecheckpoint::io
