// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/disk_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "csrc/base/bytes.h"
#include "csrc/io/directory.h"
#include "csrc/io/journal.h"
#include "csrc/io/late_changes.h"
#include "csrc/io/open_beneath.h"

namespace bytecheckpoint::io {
namespace {

using base::Status;
using base::text;

constexpr int kNew = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW;

/// Size of a request of `write_past_cache`. Larger ones were not faster on the disk that was measured.
constexpr size_t kBufferBytes = 4 << 20;

/// Does what fstat does, and asks the server: file systems of networks and in user space remember the size that a file
/// had before another machine replaced it.
int fresh_stat(int fd, struct stat* info) {
  struct statx fresh;
  if (::statx(fd, "", AT_EMPTY_PATH | AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, &fresh) != 0) {
    return errno == ENOSYS || errno == EPERM ? ::fstat(fd, info) : -1;  // some containers refuse the call
  }
  info->st_mode = fresh.stx_mode;
  info->st_size = static_cast<off_t>(fresh.stx_size);
  info->st_ino = fresh.stx_ino;
  info->st_nlink = fresh.stx_nlink;
  info->st_mtim = {fresh.stx_mtime.tv_sec, fresh.stx_mtime.tv_nsec};
  return 0;
}

/// Opens a file below a directory that is open for reading: NFS then asks its server about the name, which it does not
/// below O_PATH, the way for a directory that this user may enter but not list. \returns the descriptor; -1 with errno.
int open_in(const std::string& directory, const std::string& name, int flags) {
  int in = open_retrying(directory.c_str(), O_RDONLY | O_DIRECTORY, 0);
  if (in < 0 && errno == EACCES) in = open_retrying(directory.c_str(), O_PATH | O_DIRECTORY, 0);
  if (in < 0) return -1;
  const int fd = open_beneath(in, name, flags);
  const int error = errno;
  ::close(in);
  errno = error;
  return fd;
}

}  // namespace

base::Result<DiskFile> DiskFile::open(const std::string& directory, const std::string& name, bool direct) {
  const std::string path = join(directory, name);
  const int flags = O_RDONLY | (direct ? O_DIRECT : 0);
  const int fd = call_until_seen(directory, [&] { return open_in(directory, name, flags); });
  const int error = errno;
  if (fd < 0 && direct && error == EINVAL) return open(directory, name, false);
  if (fd < 0 && (error == ELOOP || error == EXDEV)) {
    return Status::make(
        base::Code::kCorrupt,
        text("open(", path, "): the name leads out of ", directory,
             ", or through a symbolic link; such a file is not read: copy the folder by cp -rL, which follows links"),
        path, error);
  }
  if (fd < 0) return Status::storage("open", path, "read", error);
  DiskFile file(Descriptor(fd, path, direct));
  struct stat info;
  if (::fstat(fd, &info) != 0) return Status::storage("fstat", path, "", errno);
  if (!S_ISREG(info.st_mode)) {
    return Status::storage("open", path, "not a regular file", S_ISDIR(info.st_mode) ? EISDIR : EINVAL);
  }
  if (direct && !takes_direct(fd, info.st_dev, /*is_new=*/false)) return open(directory, name, false);
  return file;
}

base::Result<DiskFile> DiskFile::create(const std::string& path, bool direct) {
  const int fd = open_retrying(path.c_str(), kNew | (direct ? O_DIRECT : 0), 0666);
  if (fd < 0 && direct && errno == EINVAL) {
    // Some file systems create the file before they refuse the flag.
    ::unlink(path.c_str());
    return create(path, false);
  }
  if (fd < 0) return Status::storage("open", path, "create", errno);
  DiskFile file(Descriptor(fd, path, direct));
  BCP_JOURNAL(created(fd, path));
  struct stat info;
  if (direct && ::fstat(fd, &info) != 0) return Status::storage("fstat", path, "", errno);
  if (direct && !takes_direct(fd, info.st_dev, /*is_new=*/true)) {
    BCP_RETURN_IF_ERROR(file.descriptor_.stop_direct());
    file.descriptor_.forget_direct();
  }
  return file;
}

base::Result<DiskFile> DiskFile::create(const OpenDirectory& in, const std::string& name) {
  const std::string path = join(in.path(), name);
  const int fd = open_retrying(name.c_str(), kNew, 0666, in.fd());
  if (fd < 0) return Status::storage("open", path, "create", errno);
  DiskFile file(Descriptor(fd, path, /*direct=*/false));
  BCP_JOURNAL(created(fd, path));
  return file;
}

Status DiskFile::write_at(const void* bytes, int64_t size, int64_t offset) {
  const auto* from = static_cast<const char*>(bytes);
  while (size > 0) {
    // Such a file ends with an unaligned tail. The aligned part before it still goes directly.
    int64_t part = size;
    bool direct = is_direct();
    if (direct && !is_aligned(from, size, offset)) {
      part = base::align_down(size, kDirectAlignment);
      if (part == 0 || !is_aligned(from, part, offset)) {
        BCP_RETURN_IF_ERROR(descriptor_.stop_direct());
        direct = false;
        part = size;
      }
    }
    const ssize_t written = ::pwrite(descriptor_.for_transfer(direct), from, static_cast<size_t>(part), offset);
    if (written < 0) {
      if (errno == EINTR) continue;
      if (errno == EINVAL && direct) {
        note_refusal_of_direct();
        BCP_RETURN_IF_ERROR(descriptor_.stop_direct());
        continue;
      }
      return Status::storage("pwrite", path(), text("offset=", offset, ", ", part, " bytes"), errno);
    }
    if (written == 0) return Status::storage("pwrite", path(), text("offset=", offset, ", wrote nothing"), EIO);
    BCP_JOURNAL(wrote(fd(), path(), from, written, offset));
    space_.note_written(offset + written);
    from += written;
    size -= written;
    offset += written;
  }
  return Status::ok();
}

base::Result<int64_t> DiskFile::write_together(const std::vector<std::string_view>& pieces, int64_t offset) {
  const bool direct = is_direct();
  std::vector<iovec> vectors;
  int64_t end = offset;
  for (const std::string_view piece : pieces) {
    const auto size = static_cast<int64_t>(piece.size());
    if (vectors.size() == IOV_MAX || (direct && !is_aligned(piece.data(), size, end))) break;
    vectors.push_back({const_cast<char*>(piece.data()), piece.size()});
    end += size;
  }
  if (vectors.size() < 2) return 0;
  ssize_t written;
  do {
    written = ::pwritev(descriptor_.for_transfer(direct), vectors.data(), static_cast<int>(vectors.size()), offset);
  } while (written < 0 && errno == EINTR);
  if (written < 0 && errno == EINVAL && direct) return 0;  // the pieces meet the same error, one by one
  if (written < 0) {
    return Status::storage("pwritev", path(), text("offset=", offset, ", ", end - offset, " bytes"), errno);
  }
  int64_t at = offset;
  for (const iovec& vector : vectors) {
    const int64_t part = std::min(offset + written - at, static_cast<int64_t>(vector.iov_len));
    if (part > 0) BCP_JOURNAL(wrote(fd(), path(), vector.iov_base, part, at));
    at += part;
  }
  space_.note_written(offset + written);
  return static_cast<int64_t>(written);
}

Status DiskFile::write_at(const std::vector<std::string_view>& pieces, int64_t offset) {
  BCP_ASSIGN_OR_RETURN(int64_t done, write_together(pieces, offset));
  for (const std::string_view piece : pieces) {
    const auto size = static_cast<int64_t>(piece.size()), skipped = std::min(done, size);
    if (skipped < size) BCP_RETURN_IF_ERROR(write_at(piece.data() + skipped, size - skipped, offset + skipped));
    done -= skipped;
    offset += size;
  }
  return Status::ok();
}

Status DiskFile::write_past_cache(std::string_view bytes, int64_t offset) {
  descriptor_.start_direct();
  const std::unique_ptr<void, decltype(&std::free)> buffer(
      is_direct() ? std::aligned_alloc(kDirectAlignment, kBufferBytes) : nullptr, &std::free);
  if (buffer == nullptr) return write_at(bytes.data(), static_cast<int64_t>(bytes.size()), offset);
  while (!bytes.empty()) {
    const std::string_view part = bytes.substr(0, kBufferBytes);
    std::memcpy(buffer.get(), part.data(), part.size());
    BCP_RETURN_IF_ERROR(write_at(buffer.get(), static_cast<int64_t>(part.size()), offset));
    offset += static_cast<int64_t>(part.size());
    bytes.remove_prefix(part.size());
  }
  return Status::ok();
}

base::Result<int64_t> DiskFile::read_at(void* bytes, int64_t size, int64_t offset, int64_t wanted) {
  auto* to = static_cast<char*>(bytes);
  int64_t done = 0;
  while (done < size) {
    bool direct = is_direct();
    if (direct && !is_aligned(to + done, size - done, offset + done)) {
      // A direct read that ends unaligned has met the end of the file. If bytes are missing, it may have been short for
      // another reason: then it goes on through the page cache.
      if (done >= wanted) break;
      BCP_RETURN_IF_ERROR(descriptor_.stop_direct());
      direct = false;
    }
    const ssize_t got =
        ::pread(descriptor_.for_transfer(direct), to + done, static_cast<size_t>(size - done), offset + done);
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EINVAL && direct) {
        note_refusal_of_direct();
        BCP_RETURN_IF_ERROR(descriptor_.stop_direct());
        continue;
      }
      return Status::storage("pread", path(), text("offset=", offset + done, ", ", size - done, " bytes"), errno);
    }
    if (got == 0) break;
    done += got;
  }
  return done;
}

base::Result<int64_t> DiskFile::size() const {
  struct stat info;
  if (fresh_stat(fd(), &info) != 0) return Status::storage("statx", path(), "", errno);
  return static_cast<int64_t>(info.st_size);
}

base::Result<base::FileVersion> DiskFile::version() const {
  base::FileVersion version;
  struct stat info;
  if (fresh_stat(fd(), &info) != 0) return Status::storage("statx", path(), "", errno);
  constexpr int64_t kNsPerSecond = 1'000'000'000;
  version.bytes = info.st_size;
  version.mtime_ns = info.st_mtim.tv_sec * kNsPerSecond + info.st_mtim.tv_nsec;
  version.inode = info.st_ino;
  return version;
}

bool DiskFile::has_name() const {
  struct stat info;
  return fresh_stat(fd(), &info) == 0 && info.st_nlink > 0;
}

}  // namespace bytecheckpoint::io
