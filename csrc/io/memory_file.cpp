// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/memory_file.h"

#include <sys/mman.h>
#include <unistd.h>

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
  BCP_ASSIGN_OR_RETURN(int fd, place.store->in_memory()->spare(place.name));
  const bool is_spare = fd >= 0;
  if (!is_spare) fd = ::memfd_create("bytecheckpoint", MFD_CLOEXEC);
  if (fd < 0) return Status::storage("memfd_create", path, "", errno);
  MemoryFile file;
  file.memory_ = DiskFile(Descriptor(fd, path, /*direct=*/false));
  file.place_ = place;
  file.is_new_ = true;
  if (is_spare) {
    BCP_ASSIGN_OR_RETURN(file.spare_bytes_, file.memory_.size());
  }
  return file;
}

Status MemoryFile::reserve(int64_t bytes) {
  BCP_RETURN_IF_ERROR(place_.store->in_memory()->reserve(place_.name, bytes, spare_bytes_));
  return bytes > spare_bytes_ ? memory_.reserve(bytes) : Status::ok();
}

Status MemoryFile::truncate(int64_t bytes) {
  if (::ftruncate(memory_.fd(), bytes) == 0) return Status::ok();
  return Status::storage("ftruncate", path(), base::text(bytes, " bytes"), errno);
}

Status MemoryFile::finish() {
  if (!std::exchange(is_new_, false)) return Status::ok();
  return place_.store->in_memory()->keep(place_.name, memory_.fd());
}

Status MemoryFile::close() {
  const Status finished = finish();
  const Status closed = memory_.close();
  return finished.is_ok() ? closed : finished;
}

}  // namespace bytecheckpoint::io
