// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/io/direct_io.h"
#include "csrc/io/directory.h"
#include "csrc/io/file_system.h"
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

/// Held while a file is opened once more.
std::mutex reopening;

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

int open_retrying(const char* path, int flags, mode_t mode, int directory = AT_FDCWD) {
  int fd;
  do {
    fd = ::openat(directory, path, flags | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  return fd;
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

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    close_all();
    path_ = std::move(other.path_);
    fd_ = std::exchange(other.fd_, -1);
    buffered_ = std::exchange(other.buffered_, -1);
    store_ = std::move(other.store_);
    name_ = std::move(other.name_);
    object_ = std::move(other.object_);
    upload_ = std::move(other.upload_);
    direct_ = other.direct_.load();
    end_ = other.end_.load();
  }
  return *this;
}

File::~File() {
  close_all();
}

base::Result<File> File::open_object(const std::string& url, const std::string& name) {
  File file;
  file.path_ = join(url, name);
  if (name.empty() || name.front() == '/' || (name + "/").find("../") != std::string::npos) {
    return Status::make(base::Code::kCorrupt,
                        text("open(", file.path_, "): the name leads out of ", url,
                             ", which the name of a checkpoint file must not do"),
                        file.path_, EXDEV);
  }
  BCP_ASSIGN_OR_RETURN(StorePlace place, place_in_store(file.path_));
  BCP_ASSIGN_OR_RETURN(file.object_, place.store->open(place.name));
  file.store_ = std::move(place.store);
  file.name_ = std::move(place.name);
  return file;
}

base::Result<File> File::open(const std::string& directory, const std::string& name, bool direct) {
  if (is_url(directory)) return open_object(directory, name);
  File file;
  file.path_ = join(directory, name);
  const int flags = O_RDONLY | (direct ? O_DIRECT : 0);
  file.fd_ = call_until_seen(directory, [&] { return open_in(directory, name, flags); });
  const int error = errno;
  if (file.fd_ < 0 && direct && error == EINVAL) return open(directory, name, false);
  if (file.fd_ < 0 && (error == ELOOP || error == EXDEV)) {
    return Status::make(base::Code::kCorrupt,
                        text("open(", file.path_, "): the name leads out of ", directory,
                             ", or through a symbolic link; such a file is not read"),
                        file.path_, error);
  }
  if (file.fd_ < 0) return Status::storage("open", file.path_, "read", error);
  file.direct_ = direct;
  struct stat info;
  if (::fstat(file.fd_, &info) != 0) return Status::storage("fstat", file.path_, "", errno);
  if (!S_ISREG(info.st_mode)) {
    return Status::storage("open", file.path_, "not a regular file", S_ISDIR(info.st_mode) ? EISDIR : EINVAL);
  }
  if (direct && !takes_direct(file.fd_, info.st_dev, /*is_new=*/false)) return open(directory, name, false);
  return file;
}

base::Result<File> File::create(const std::string& path, bool direct) {
  File file;
  file.path_ = path;
  if (is_url(path)) {
    BCP_ASSIGN_OR_RETURN(const StorePlace place, place_in_store(path));
    BCP_ASSIGN_OR_RETURN(file.upload_, place.store->create(place.name));
    return file;
  }
  file.fd_ = open_retrying(path.c_str(), kNew | (direct ? O_DIRECT : 0), 0666);
  if (file.fd_ < 0 && direct && errno == EINVAL) {
    // Some file systems create the file before they refuse the flag.
    ::unlink(path.c_str());
    return create(path, false);
  }
  if (file.fd_ < 0) return Status::storage("open", path, "create", errno);
  file.direct_ = direct;
  BCP_JOURNAL(created(file.fd_, path));
  struct stat info;
  if (direct && ::fstat(file.fd_, &info) != 0) return Status::storage("fstat", path, "", errno);
  if (direct && !takes_direct(file.fd_, info.st_dev, /*is_new=*/true)) {
    BCP_RETURN_IF_ERROR(file.stop_direct());
    // Nothing was transferred through the first descriptor.
    if (file.buffered_ >= 0) ::close(std::exchange(file.fd_, std::exchange(file.buffered_, -1)));
  }
  return file;
}

base::Result<File> File::create(const OpenDirectory& in, const std::string& name) {
  File file;
  file.path_ = join(in.path(), name);
  file.fd_ = open_retrying(name.c_str(), kNew, 0666, in.fd());
  if (file.fd_ < 0) return Status::storage("open", file.path_, "create", errno);
  BCP_JOURNAL(created(file.fd_, file.path_));
  return file;
}

void File::start_direct() {
  const int flags = fd_ < 0 ? -1 : ::fcntl(fd_, F_GETFL);
  if (flags >= 0 && ::fcntl(fd_, F_SETFL, flags | O_DIRECT) == 0) direct_ = true;
}

Status File::stop_direct() {
  const std::lock_guard lock(reopening);
  if (!direct_) return Status::ok();  // another thread was first
  const int flags = ::fcntl(fd_, F_GETFL);
  if (flags < 0) return Status::storage("fcntl", path_, "", errno);
  if (!is_in_user_space(fd_)) {
    ::fcntl(fd_, F_SETFL, flags & ~O_DIRECT);
  } else if (buffered_ < 0) {
    const std::string link = text("/proc/self/fd/", fd_);
    buffered_ = open_retrying(link.c_str(), flags & O_ACCMODE, 0);
    if (buffered_ < 0) return Status::storage("open", path_, "again, without O_DIRECT", errno);
  }
  // The descriptors change first: a thread that reads direct_ as false relies on that.
  direct_ = false;
  return Status::ok();
}

Status File::write_at(const void* bytes, int64_t size, int64_t offset) {
  if (upload_ != nullptr) return upload_->write_at(static_cast<const uint8_t*>(bytes), size, offset);
  const auto* from = static_cast<const char*>(bytes);
  while (size > 0) {
    // Such a file ends with an unaligned tail. The aligned part before it still goes directly.
    int64_t part = size;
    bool direct = direct_;
    if (direct && !is_aligned(from, size, offset)) {
      part = base::align_down(size, kDirectAlignment);
      if (part == 0 || !is_aligned(from, part, offset)) {
        BCP_RETURN_IF_ERROR(stop_direct());
        direct = false;
        part = size;
      }
    }
    const ssize_t written = ::pwrite(descriptor(direct), from, static_cast<size_t>(part), offset);
    if (written < 0) {
      if (errno == EINTR) continue;
      if (errno == EINVAL && direct) {
        note_refusal_of_direct();
        BCP_RETURN_IF_ERROR(stop_direct());
        continue;
      }
      return Status::storage("pwrite", path_, text("offset=", offset, ", ", part, " bytes"), errno);
    }
    if (written == 0) return Status::storage("pwrite", path_, text("offset=", offset, ", wrote nothing"), EIO);
    BCP_JOURNAL(wrote(fd_, path_, from, written, offset));
    note_end(offset + written);
    from += written;
    size -= written;
    offset += written;
  }
  return Status::ok();
}

base::Result<int64_t> File::write_together(const std::vector<std::string_view>& pieces, int64_t offset) {
  const bool direct = direct_;
  std::vector<iovec> vectors;
  int64_t end = offset;
  for (const std::string_view piece : pieces) {
    const auto size = static_cast<int64_t>(piece.size());
    if (vectors.size() == IOV_MAX || (direct && !is_aligned(piece.data(), size, end))) break;
    vectors.push_back({const_cast<char*>(piece.data()), piece.size()});
    end += size;
  }
  if (upload_ != nullptr || vectors.size() < 2) return 0;
  ssize_t written;
  do {
    written = ::pwritev(descriptor(direct), vectors.data(), static_cast<int>(vectors.size()), offset);
  } while (written < 0 && errno == EINTR);
  if (written < 0 && errno == EINVAL && direct) return 0;  // the pieces meet the same error, one by one
  if (written < 0) {
    return Status::storage("pwritev", path_, text("offset=", offset, ", ", end - offset, " bytes"), errno);
  }
  int64_t at = offset;
  for (const iovec& vector : vectors) {
    const int64_t part = std::min(offset + written - at, static_cast<int64_t>(vector.iov_len));
    if (part > 0) BCP_JOURNAL(wrote(fd_, path_, vector.iov_base, part, at));
    at += part;
  }
  note_end(offset + written);
  return static_cast<int64_t>(written);
}

void File::note_end(int64_t end) {
  int64_t before = end_;
  while (before >= 0 && before < end && !end_.compare_exchange_weak(before, end)) {
  }
}

Status File::write_at(const std::vector<std::string_view>& pieces, int64_t offset) {
  BCP_ASSIGN_OR_RETURN(int64_t done, write_together(pieces, offset));
  for (const std::string_view piece : pieces) {
    const auto size = static_cast<int64_t>(piece.size()), skipped = std::min(done, size);
    if (skipped < size) BCP_RETURN_IF_ERROR(write_at(piece.data() + skipped, size - skipped, offset + skipped));
    done -= skipped;
    offset += size;
  }
  return Status::ok();
}

Status File::write_past_cache(std::string_view bytes, int64_t offset) {
  start_direct();
  const std::unique_ptr<void, decltype(&std::free)> buffer(
      direct_ ? std::aligned_alloc(kDirectAlignment, kBufferBytes) : nullptr, &std::free);
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

base::Result<int64_t> File::read_at(void* bytes, int64_t size, int64_t offset, int64_t wanted) {
  auto* to = static_cast<char*>(bytes);
  int64_t done = 0;
  while (store_ != nullptr && done < std::min(size, object_.bytes - offset)) {
    const int64_t left = std::min(size, object_.bytes - offset) - done;
    BCP_ASSIGN_OR_RETURN(const int64_t got,
                         store_->read(name_, object_, reinterpret_cast<uint8_t*>(to + done), left, offset + done));
    if (got == 0) break;
    done += got;
  }
  while (store_ == nullptr && done < size) {
    bool direct = direct_;
    if (direct && !is_aligned(to + done, size - done, offset + done)) {
      // A direct read that ends unaligned has met the end of the file. If bytes are missing, it may have been short for
      // another reason: then it goes on through the page cache.
      if (done >= wanted) break;
      BCP_RETURN_IF_ERROR(stop_direct());
      direct = false;
    }
    const ssize_t got = ::pread(descriptor(direct), to + done, static_cast<size_t>(size - done), offset + done);
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EINVAL && direct) {
        note_refusal_of_direct();
        BCP_RETURN_IF_ERROR(stop_direct());
        continue;
      }
      return Status::storage("pread", path_, text("offset=", offset + done, ", ", size - done, " bytes"), errno);
    }
    if (got == 0) break;
    done += got;
  }
  if (done < wanted) {
    return Status::make(
        base::Code::kCorrupt,
        text("pread(", path_, ", offset=", offset, ", ", wanted, " bytes): file ends after ", done, " bytes"), path_,
        ENODATA);
  }
  return done;
}

base::Result<std::string> File::read(int64_t offset, int64_t size) {
  std::string bytes(static_cast<size_t>(size), '\0');
  BCP_RETURN_IF_ERROR(read_at(bytes.data(), size, offset, size).status());
  return bytes;
}

base::Result<int64_t> File::size() const {
  if (store_ != nullptr) return object_.bytes;
  struct stat info;
  if (fresh_stat(fd_, &info) != 0) return Status::storage("statx", path_, "", errno);
  return static_cast<int64_t>(info.st_size);
}

base::Result<base::FileVersion> File::version() const {
  base::FileVersion version;
  if (store_ != nullptr) {
    version.bytes = object_.bytes;
    version.etag = object_.version;
    return version;
  }
  struct stat info;
  if (fresh_stat(fd_, &info) != 0) return Status::storage("statx", path_, "", errno);
  constexpr int64_t kNsPerSecond = 1'000'000'000;
  version.bytes = info.st_size;
  version.mtime_ns = info.st_mtim.tv_sec * kNsPerSecond + info.st_mtim.tv_nsec;
  version.inode = info.st_ino;
  return version;
}

bool File::has_name() const {
  struct stat info;
  return fresh_stat(fd_, &info) == 0 && info.st_nlink > 0;
}

Status File::reserve(int64_t bytes) {
  if (bytes <= 0 || upload_ != nullptr) return Status::ok();
  int result;
  do {
    result = ::fallocate(fd_, FALLOC_FL_KEEP_SIZE, 0, bytes);
  } while (result != 0 && errno == EINTR);
  if (result == 0) {
    BCP_JOURNAL(reserved(fd_, path_, bytes));
    return Status::ok();
  }
  // Only these two errors mean that there is no space. All others mean that reserving is not supported.
  if (errno == ENOSPC || errno == EDQUOT) return Status::storage("fallocate", path_, text(bytes, " bytes"), errno);
  struct stat info;
  if (end_ < 0 && ::fstat(fd_, &info) == 0 && info.st_size == 0) end_ = 0;
  return check_room(path_, bytes);
}

Status File::truncate(int64_t bytes) {
  if (upload_ != nullptr) {
    object_.bytes = bytes;
    return Status::ok();
  }
  if (end_ == bytes) return Status::ok();  // where nothing was reserved, one message less to a server that syncs for it
  int result;
  do {
    result = ::ftruncate(fd_, bytes);
  } while (result != 0 && errno == EINTR);
  if (result != 0) return Status::storage("ftruncate", path_, text(bytes, " bytes"), errno);
  BCP_JOURNAL(truncated(fd_, path_, bytes));
  return Status::ok();
}

Status File::finish_upload() {
  const std::shared_ptr<Upload> upload = std::move(upload_);
  return upload == nullptr ? Status::ok() : upload->finish(object_.bytes);
}

Status File::sync() {
  if (fd_ < 0) return finish_upload();
  if (::fsync(fd_) != 0) return Status::storage("fsync", path_, "", errno);
  if (buffered_ >= 0 && ::fsync(buffered_) != 0) {
    return Status::storage("fsync", path_, "without O_DIRECT", errno);
  }
  BCP_JOURNAL(synced(fd_, path_));
  return Status::ok();
}

Status File::flush() {
  if (fd_ < 0) return Status::ok();
  // Closing any descriptor of the file flushes it. Locks (flock) belong to the open file, so they stay with the other
  // descriptor.
  for (const int fd : {fd_, buffered_}) {
    if (fd < 0) continue;
    const int same = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (same < 0) return Status::storage("dup", path_, "", errno);
    if (::close(same) != 0) return Status::storage("close", path_, "", errno);
  }
  return Status::ok();
}

int File::close_all() {
  int error = 0;
  for (const int fd : {std::exchange(buffered_, -1), std::exchange(fd_, -1)}) {
    // Linux frees the descriptor whatever close returns: never retried.
    if (fd >= 0 && ::close(fd) != 0 && error == 0) error = errno;
  }
  return error;
}

Status File::close() {
  store_.reset();
  if (fd_ < 0) return finish_upload();
  const int error = close_all();
  return error == 0 ? Status::ok() : Status::storage("close", path_, "", error);
}

base::Result<std::string> read_file(const std::string& directory, const std::string& name) {
  BCP_ASSIGN_OR_RETURN(File file, File::open(directory, name, /*direct=*/false));
  BCP_ASSIGN_OR_RETURN(const int64_t size, file.size());
  return file.read(0, size);
}

}  // namespace bytecheckpoint::io
