// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <utility>

#include "tests/cpp/simulated_disk.h"

namespace bytecheckpoint::test {

/// A real directory that shows one tree after another, for code that opens files. Changes only what differs.
class ShownTree {
 public:
  /// \param root  An existing directory. The first tree replaces its content.
  explicit ShownTree(std::string root) : root_(std::move(root)) { forget(); }

  void show(const DiskTree& tree) {
    if (!is_known_) clear();
    for (const auto& [path, content] : shown_.files) {
      if (tree.files.count(path) == 0) must(::unlink(at(path).c_str()), path);
    }
    // In reverse, because a directory sorts before its content.
    for (auto path = shown_.directories.rbegin(); path != shown_.directories.rend(); ++path) {
      if (tree.directories.count(*path) == 0) must(::rmdir(at(*path).c_str()), *path);
    }
    for (const std::string& path : tree.directories) {
      if (shown_.directories.count(path) == 0) must(::mkdir(at(path).c_str(), 0777), path);
    }
    for (const auto& [path, content] : tree.files) {
      const auto before = shown_.files.find(path);
      if (before == shown_.files.end() || before->second->bytes != content->bytes) write(path, content->bytes);
    }
    shown_ = tree;
    is_known_ = true;
  }

  /// Call this after other code has changed the directory.
  void forget() { is_known_ = false; }

 private:
  std::string at(const std::string& path) const { return root_ + "/" + path; }

  static void must(int result, const std::string& path) {
    if (result < 0) throw std::runtime_error("cannot show " + path);
  }

  void clear() {
    for (const auto& entry : std::filesystem::directory_iterator(root_)) std::filesystem::remove_all(entry.path());
    shown_ = {};
  }

  void write(const std::string& path, const std::string& bytes) {
    const int fd = ::open(at(path).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    must(fd, path);
    const bool written = ::pwrite(fd, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()) &&
                         ::ftruncate(fd, static_cast<off_t>(bytes.size())) == 0;
    ::close(fd);
    must(written ? 0 : -1, path);
  }

  const std::string root_;
  bool is_known_ = false;
  DiskTree shown_;
};

}  // namespace bytecheckpoint::test
