// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <utility>

namespace bytecheckpoint::io {

using base::Status;

base::Result<MemoryFile> MemoryFile::open(const StorePlace& place, const std::string& path) {
  MemoryFile file;
  BCP_ASSIGN_OR_RETURN(const int fd, place.store->in_memory()->descriptor(place.name));
  file.memory_ = DiskFile(Descriptor(fd, path, /*direct=*/false));
  file.place_ = place;
  return file;
}

base::Result<MemoryFile> MemoryFile::create(const StorePlace& place, const std::string& path) {
  const int fd = ::memfd_create("bytecheckpoint", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return Status::storage("memfd_create", path, "", errno);
  MemoryFile file;
  file.memory_ = DiskFile(Descriptor(fd, path, /*direct=*/false));
  file.place_ = place;
  file.is_new_ = true;
  return file;
}

Status MemoryFile::reserve(int64_t bytes) {
  BCP_RETURN_IF_ERROR(place_.store->in_memory()->reserve(place_.name, bytes));
  return memory_.reserve(bytes);
}

Status MemoryFile::finish() {
  if (!std::exchange(is_new_, false)) return Status::ok();
  if (::fcntl(memory_.fd(), F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) != 0) {
    return Status::storage("fcntl", path(), "seal", errno);
  }
  return place_.store->in_memory()->keep(place_.name, memory_.fd());
}

Status MemoryFile::close() {
  const Status finished = finish();
  const Status closed = memory_.close();
  return finished.is_ok() ? closed : finished;
}

}  // namespace bytecheckpoint::io
