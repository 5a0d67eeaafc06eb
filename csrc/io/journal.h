// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace bytecheckpoint::io {

/// One change of the file system that has succeeded, or a wait for earlier ones to be on disk.
struct Change {
  enum class Kind : uint8_t {
    kCreateFile,
    kWrite,
    kReserve,
    kTruncate,
    kSyncFile,
    kMakeDirectory,
    kRename,
    kLink,
    kRemoveFile,
    kSyncDirectory,
  };

  Kind kind{};
  std::string path;    // as the caller named it; of an open file, the name that it was created with
  std::string to;      // kRename, kLink: the other name
  uint64_t file = 0;   // number of the inode, of an open file; the system may give it again once the file is gone
  int64_t offset = 0;  // kWrite; kReserve, kTruncate: bytes of the file
  std::string bytes;   // kWrite
};

#if defined(BCP_FAILPOINTS)

/// Called for each change of this process that goes through this folder, in the thread that made it, right after it;
/// from several threads at once.
using Journal = std::function<void(Change)>;

/// Test builds only, as failpoints are: other builds contain nothing of it.
/// \param journal  Outlives all changes until the next call; null: none is kept.
void keep_journal(const Journal* journal);

/// Each is to be called as the last thing of what it tells of: it leaves errno in no particular state.
namespace journal {

void created(int fd, const std::string& path);
void wrote(int fd, const std::string& path, const void* bytes, int64_t size, int64_t offset);
void reserved(int fd, const std::string& path, int64_t bytes);
void truncated(int fd, const std::string& path, int64_t bytes);
void synced(int fd, const std::string& path);
void made_directory(const std::string& path);
void renamed(const std::string& from, const std::string& to);
void linked(const std::string& from, const std::string& to);
void removed(const std::string& path);
void synced_directory(const std::string& path);

}  // namespace journal

#define BCP_JOURNAL(entry) ::bytecheckpoint::io::journal::entry

#else
#define BCP_JOURNAL(entry) static_cast<void>(0)
#endif

}  // namespace bytecheckpoint::io
