// SPDX-License-Identifier: Apache-2.0
#pragma once

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

/// An object that is memory of this machine (`MemoryObjects`) as a file. A new one is anonymous memory of this process,
/// which ends with it, until `finish` gives it to the process that keeps it. That hands out descriptors for reading
/// alone.
///
/// Any thread may call `read_at` and `write_at`, on disjoint ranges.
class MemoryFile {
 public:
  /// Opens an object for reading. \param path  Its URL, for messages. \returns kStorage.
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
  /// Asks for the memory, and takes it, so that none is missing later. \returns kStorage with ENOMEM.
  base::Status reserve(int64_t bytes);
  /// Sets the size. Also where older bytes of spare memory lie behind it.
  base::Status truncate(int64_t bytes);
  /// Gives a new object away. \returns kStorage.
  base::Status finish();
  base::Status close();

  bool is_open() const { return memory_.is_open(); }
  const std::string& path() const { return memory_.path(); }

 private:
  DiskFile memory_;
  StorePlace place_;
  bool is_new_ = false;
  int64_t spare_bytes_ = 0;  // that a new one began with
};

}  // namespace bytecheckpoint::io
