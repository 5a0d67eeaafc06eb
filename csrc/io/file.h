// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "csrc/base/file_version.h"
#include "csrc/base/packing.h"
#include "csrc/base/status.h"
#include "csrc/io/disk_file.h"
#include "csrc/io/memory_file.h"
#include "csrc/io/object_file.h"
#include "csrc/io/unpacker.h"

namespace bytecheckpoint::io {

/// One open file of a checkpoint, wherever that is: of a file system (`disk_file.h`); or an object of a store
/// (`object_file.h`), or of the memory of this machine (`memory_file.h`), which exists when `sync` or `close` has
/// succeeded.
///
/// Offsets are absolute; the file has no position. Any thread may call `read_at` and `write_at`, on disjoint ranges.
/// Errors name operation, path, offset and sizes.
class File {
 public:
  File() = default;
  explicit File(DiskFile file) : file_(std::move(file)) {}

  /// Opens a file for reading. \param directory  The caller's: a path, or a URL. \param name  Comes from a checkpoint,
  /// and may not lead out of it. \param direct  Of a file system: use O_DIRECT if it has that.
  /// \returns kCorrupt for such a name. kStorage, also for anything but a regular file.
  static base::Result<File> open(const std::string& directory, const std::string& name, bool direct);
  /// Creates a file. \returns kStorage, with EEXIST if the name exists in a file system.
  static base::Result<File> create(const std::string& path, bool direct);

  /// Makes a file that was opened for reading one that has what a stretch of it unpacks to.
  /// \returns kCorrupt if the file is too short. kUnsupported if this machine cannot unpack it.
  base::Status unpack(const base::Packing& packing);

  /// Writes all `size` bytes. \returns kStorage.
  base::Status write_at(const void* bytes, int64_t size, int64_t offset);
  /// Writes pieces of memory one behind another. \returns kStorage.
  base::Status write_at(const std::vector<std::string_view>& pieces, int64_t offset);
  /// Reads until `size` bytes or the end of the file. \returns the number of bytes read; kCorrupt if it is less than
  /// `wanted`; kChanged if what is unpacked changes meanwhile; kStorage.
  base::Result<int64_t> read_at(void* bytes, int64_t size, int64_t offset, int64_t wanted);
  /// Reads `size` bytes at `offset`. \returns kCorrupt if the file ends before. kStorage.
  base::Result<std::string> read(int64_t offset, int64_t size);

  base::Result<int64_t> size() const;
  /// Returns what another content of this file would not have.
  base::Result<base::FileVersion> version() const;
  /// Reserves space on a disk or in memory, without changing the size. \returns kStorage with ENOSPC or EDQUOT if there
  /// is none.
  base::Status reserve(int64_t bytes);
  /// Returns where a range of a new file is in memory, to be filled there: of one that is memory, what is reserved.
  /// \returns null for all else.
  uint8_t* memory(int64_t offset, int64_t size) const;
  /// Sets the size.
  base::Status truncate(int64_t bytes);
  /// Makes the file durable. A failure is final.
  base::Status sync();
  /// Closes the file. A failure may be the only report that written data are lost. It may be ignored if the file was
  /// synced.
  base::Status close();

  bool is_open() const;
  const std::string& path() const;
  /// Returns the file of a file system; null for an object, and for what is unpacked.
  const DiskFile* on_disk() const { return unpacker_ == nullptr ? std::get_if<DiskFile>(&file_) : nullptr; }
  /// Whether it is memory of this machine.
  bool is_in_memory() const;
  /// Whether `write_at` takes bytes from any memory, and not from the slots of a ring alone.
  bool takes_any_memory() const { return !std::holds_alternative<ObjectFile>(file_); }

 private:
  /// Returns why the file does not unpack: somebody may be writing it again.
  base::Status explain(base::Status failure) const;
  /// Reads from the file as it is.
  base::Result<int64_t> read_stored(void* bytes, int64_t size, int64_t offset, int64_t wanted);

  std::variant<DiskFile, ObjectFile, MemoryFile> file_;
  std::shared_ptr<Unpacker> unpacker_;  // null for a file as it is
  base::FileVersion unpacked_;          // the version that it unpacks
};

/// Reads a whole small file through the page cache. \returns kStorage, with ENOENT if it is absent.
base::Result<std::string> read_file(const std::string& directory, const std::string& name);

}  // namespace bytecheckpoint::io
