// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/file_version.h"
#include "csrc/base/status.h"
#include "csrc/io/object_store.h"

namespace bytecheckpoint::io {

/// An object of a store as a file. It is either read, always in the version that was opened, or written, once and
/// whole: it exists when `finish` has succeeded.
///
/// Any thread may call `read_at` and `write_at`, on disjoint ranges.
class ObjectFile {
 public:
  /// Opens an object for reading. \param url  Its URL, for messages. \returns kStorage.
  static base::Result<ObjectFile> open(StorePlace place, const std::string& url);
  /// Begins to write an object.
  static base::Result<ObjectFile> create(const StorePlace& place, const std::string& url);

  base::Status write_at(const void* bytes, int64_t size, int64_t offset);
  /// Writes pieces of memory one behind another.
  base::Status write_at(const std::vector<std::string_view>& pieces, int64_t offset);
  /// Reads until `size` bytes or the end of the object. \returns the number of bytes read. kStorage, kChanged.
  base::Result<int64_t> read_at(void* bytes, int64_t size, int64_t offset);

  base::Result<int64_t> size() const;
  /// Returns what another content of this object would not have.
  base::Result<base::FileVersion> version() const;
  /// Says how long the object will be. Before `finish`.
  base::Status truncate(int64_t bytes);
  /// Waits until the store has the object, if one is written. Afterwards it is closed. \returns kStorage.
  base::Status finish();
  base::Status close();

  bool is_open() const { return store_ != nullptr || upload_ != nullptr; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;  // the URL
  // Of an object that is read.
  std::shared_ptr<ObjectStore> store_;
  std::string name_;
  ObjectStore::Object object_;  // of one that is written, too: its length
  std::shared_ptr<Upload> upload_;
};

}  // namespace bytecheckpoint::io
