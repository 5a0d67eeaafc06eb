// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace bytecheckpoint::io {

/// One change of the file system, or one sync, that has succeeded.
struct FileSystemChange {
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
  std::string path;    // as the caller named it; for an open file, the path that it was created with
  std::string to;      // kRename, kLink: the new name
  uint64_t file = 0;   // inode number, for an open file; may come again once the file is gone
  int64_t offset = 0;  // kWrite: the offset; kReserve, kTruncate: bytes of the file
  std::string bytes;   // kWrite
};

#if defined(BCP_FAILPOINTS)

/// Called for each change that this folder makes, right after it, in the thread that made it; also from several threads
/// at once.
using Journal = std::function<void(FileSystemChange)>;

/// Starts to report all changes to `journal`. Only in test builds: other builds contain nothing of it, as of
/// failpoints.
/// \param journal  Must outlive all changes until the next call; null: stop reporting.
void keep_journal(const Journal* journal);

/// Call each of these last in the function whose change it reports: errno is undefined afterwards.
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
