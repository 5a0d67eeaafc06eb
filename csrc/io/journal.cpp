// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/journal.h"

#if defined(BCP_FAILPOINTS)

#include <sys/stat.h>

#include <atomic>
#include <utility>

namespace bytecheckpoint::io {
namespace {

// No lock: a test build forks servers while other threads write.
std::atomic<const Journal*> kept{nullptr};

using Kind = FileSystemChange::Kind;

void note(Kind kind, const std::string& path, const std::string& to = {}) {
  if (const Journal* journal = kept; journal != nullptr) (*journal)({kind, path, to, 0, 0, {}});
}

void note_of_file(Kind kind, int fd, const std::string& path, int64_t offset = 0, std::string bytes = {}) {
  const Journal* journal = kept;
  if (journal == nullptr) return;
  struct stat info{};
  ::fstat(fd, &info);
  (*journal)({kind, path, {}, info.st_ino, offset, std::move(bytes)});
}

}  // namespace

void keep_journal(const Journal* journal) {
  kept = journal;
}

namespace journal {

void created(int fd, const std::string& path) {
  note_of_file(Kind::kCreateFile, fd, path);
}

void wrote(int fd, const std::string& path, const void* bytes, int64_t size, int64_t offset) {
  if (kept == nullptr) return;
  note_of_file(Kind::kWrite, fd, path, offset, std::string(static_cast<const char*>(bytes), static_cast<size_t>(size)));
}

void reserved(int fd, const std::string& path, int64_t bytes) {
  note_of_file(Kind::kReserve, fd, path, bytes);
}

void truncated(int fd, const std::string& path, int64_t bytes) {
  note_of_file(Kind::kTruncate, fd, path, bytes);
}

void synced(int fd, const std::string& path) {
  note_of_file(Kind::kSyncFile, fd, path);
}

void made_directory(const std::string& path) {
  note(Kind::kMakeDirectory, path);
}

void renamed(const std::string& from, const std::string& to) {
  note(Kind::kRename, from, to);
}

void linked(const std::string& from, const std::string& to) {
  note(Kind::kLink, from, to);
}

void removed(const std::string& path) {
  note(Kind::kRemoveFile, path);
}

void synced_directory(const std::string& path) {
  note(Kind::kSyncDirectory, path);
}

}  // namespace journal
}  // namespace bytecheckpoint::io

#endif
