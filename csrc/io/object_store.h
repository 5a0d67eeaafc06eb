// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/status.h"

namespace bytecheckpoint::io {

/// An object that is being written. It exists once `finish` has succeeded, whole; before that nobody sees it.
///
/// Any thread may call `write_at`, on disjoint ranges. The destructor aborts an upload that was not finished.
class Upload {
 public:
  virtual ~Upload() = default;
  /// Uploads `size` bytes, which go to `offset`. Blocks until they are not needed any more: they are then with the
  /// store, or the upload has failed. All ranges but the last have the same size, and together they have no gaps.
  virtual base::Status write_at(const uint8_t* bytes, int64_t size, int64_t offset) = 0;
  /// Waits until the store has the object. \param size  Bytes of all ranges.
  virtual base::Status finish(int64_t size) = 0;
};

/// Objects that are memory of this machine, and go from process to process as descriptors. Another process keeps them.
/// Thread-safe. Failures are kStorage.
class MemoryObjects {
 public:
  virtual ~MemoryObjects() = default;
  /// Returns a descriptor of an object, which the caller closes; -1 for one that may be in the memory of another
  /// machine: `ObjectStore::open` and `read` have those. \returns ENOENT if there is none.
  virtual base::Result<int> descriptor(const std::string& name) = 0;
  /// Returns a descriptor of memory for a new object, which the caller closes: an older object that is not needed any
  /// more, whose pages need not be found again. -1 if there is none.
  virtual base::Result<int> spare(const std::string& name) = 0;
  /// Asks for memory for an object that is to be kept. \param there  Bytes that it has already. \returns ENOMEM if the
  /// rest is not left.
  virtual base::Status reserve(const std::string& name, int64_t bytes, int64_t there) = 0;
  /// Keeps what is behind a descriptor as an object. \param fd  Stays the caller's.
  virtual base::Status keep(const std::string& name, int fd) = 0;
};

/// The objects below one URL. The bridge implements it with the client that Python has. Thread-safe.
///
/// Failures are kStorage with the errno that a file system would have: ENOENT for an object that is absent, EACCES,
/// ETIMEDOUT, EIO; or kChanged if an object was replaced since it was opened.
class ObjectStore {
 public:
  /// One version of an object.
  struct Object {
    int64_t bytes = 0;
    std::string version;  // empty if the store has none
  };

  virtual ~ObjectStore() = default;
  virtual base::Result<Object> open(const std::string& name) = 0;
  /// Reads up to `size` bytes at `offset`, which is inside the object. \returns how many there were.
  virtual base::Result<int64_t> read(const std::string& name, const Object& object, uint8_t* to, int64_t size,
                                     int64_t offset) = 0;
  virtual base::Result<std::unique_ptr<Upload>> create(const std::string& name) = 0;
  /// Returns the names right below `folder`, which is relative to the URL: of objects, and of folders.
  virtual base::Result<std::vector<std::string>> list(const std::string& folder) = 0;
  /// Has the store copy an object from another folder of its own; no byte comes here.
  /// \param from  URL of the object. \returns kStorage: EXDEV if it is in another store, EEXIST if the name is taken.
  virtual base::Status copy(const std::string& from, const std::string& name) {
    return base::Status::storage("copy", from, "to " + name, EXDEV);
  }
  /// Returns the same objects, if they are memory of this machine; else null. Then `create` is not called, and
  /// `read` only for what another machine has.
  virtual MemoryObjects* in_memory() { return nullptr; }
};

/// An object or a folder in a store: its URL is that of the store and, behind a slash, its name.
struct StorePlace {
  std::shared_ptr<ObjectStore> store;
  std::string name;  // empty for the URL of the store itself
};

/// Whether a directory is a URL, and not a path: then its files are objects of a store.
bool is_url(const std::string& directory);

/// Makes `store` the one for `url` in this process, in place of one that was registered before. A process that saves
/// every step to a URL of its own registers many: only the last thousand are kept.
void register_store(const std::string& url, std::shared_ptr<ObjectStore> store);

/// Finds the store that is registered for `url`, or for the nearest folder above it. \returns kUnsupported if there is
/// none.
base::Result<StorePlace> place_in_store(const std::string& url);

}  // namespace bytecheckpoint::io
