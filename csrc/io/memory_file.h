// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/file_version.h"
#include "csrc/base/status.h"
#include "csrc/io/disk_file.h"
#include "csrc/io/object_store.h"

namespace bytecheckpoint::io {

/// Ends a mapping, in the process that has made it: in a forked child something else may be at the address.
struct UnmapMemory {
  int64_t bytes = 0;
  pid_t owner = 0;
  void operator()(uint8_t* first) const;
};

/// An object that is memory of this machine (`MemoryObjects`) as a file. A new one is anonymous memory of this process,
/// which ends with it, until `finish` gives it to the process that keeps it. That hands out descriptors for reading
/// alone.
///
/// What is reserved is mapped, in pages of 2 MiB if the system has them for memory that processes share: it can be
/// filled by several threads at once, which `write_at` cannot.
///
/// Any thread may call `read_at` and `write_at`, and fill `memory`, on disjoint ranges.
class MemoryFile {
 public:
  /// Opens an object for reading. \param path  Its URL, for messages. \returns a file that is not open if another
  /// machine may have it. kStorage.
  static base::Result<MemoryFile> open(const StorePlace& place, const std::string& path);
  static base::Result<MemoryFile> create(const StorePlace& place, const std::string& path);

  base::Status write_at(const void* bytes, int64_t size, int64_t offset) {
    return memory_.write_at(bytes, size, offset);
  }
  base::Status write_at(const std::vector<std::string_view>& pieces, int64_t offset) {
    return memory_.write_at(pieces, offset);
  }
  base::Result<int64_t> read_at(void* bytes, int64_t size, int64_t offset) {
    return memory_.read_at(bytes, size, offset, size);
  }
  base::Result<int64_t> size() const { return memory_.size(); }
  base::Result<base::FileVersion> version() const { return memory_.version(); }
  /// Asks for the memory, takes it, so that none is missing later, and maps it. \returns kStorage with ENOMEM.
  base::Status reserve(int64_t bytes);
  /// Returns where a range of the file is in memory, until `finish`; null if not all of it is reserved.
  uint8_t* memory(int64_t offset, int64_t size) const {
    return mapped_ != nullptr && offset + size <= mapped_.get_deleter().bytes ? mapped_.get() + offset : nullptr;
  }
  /// Sets the size. Also where older bytes of spare memory lie behind it.
  base::Status truncate(int64_t bytes);
  /// Gives a new object away. \returns kStorage.
  base::Status finish();
  base::Status close();

  bool is_open() const { return memory_.is_open(); }
  const std::string& path() const { return memory_.path(); }

 private:
  /// Maps `bytes` bytes, and makes them present. \returns kStorage.
  base::Status map(int64_t bytes);

  DiskFile memory_;
  StorePlace place_;
  bool is_new_ = false;
  int64_t spare_bytes_ = 0;  // that a new one began with
  std::unique_ptr<uint8_t, UnmapMemory> mapped_;
};

}  // namespace bytecheckpoint::io
