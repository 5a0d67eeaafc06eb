// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/io/file_system.h"

namespace bytecheckpoint::test {

/// Directory for tests that need no disk: in memory, unless `$TMPDIR` is set. Null if there is no such directory.
inline const char* memory_root() {
  const char* root = std::getenv("TMPDIR");
  return root == nullptr && io::is_in_memory("/dev/shm") ? "/dev/shm" : root;
}

/// A directory for one test, which its destructor removes. `$TMPDIR` if set, so that a run can choose its file system.
class TempDir {
 public:
  TempDir() : TempDir(std::getenv("TMPDIR")) {}
  /// \param root  The parent directory. Null: /tmp.
  explicit TempDir(const char* root) {
    path_ = std::string(root == nullptr ? "/tmp" : root) + "/bcp_test_XXXXXX";
    if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error("mkdtemp(" + path_ + ")");
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

  /// Sorted names of its entries.
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) out.push_back(entry.path().filename());
    std::sort(out.begin(), out.end());
    return out;
  }

  bool has(const std::string& name) const {
    return std::filesystem::symlink_status(*this / name).type() != std::filesystem::file_type::not_found;
  }

 private:
  std::string path_;
};

inline std::string read_all(const std::string& path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  std::string bytes(in ? static_cast<size_t>(in.tellg()) : 0, '\0');
  if (!in || !in.seekg(0).read(bytes.data(), static_cast<std::streamsize>(bytes.size()))) {
    throw std::runtime_error("cannot read " + path);
  }
  return bytes;
}

inline void write_all(const std::string& path, std::string_view bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!out.flush()) throw std::runtime_error("cannot write " + path);
}

/// Flips one bit of the file.
inline void flip_bit(const std::string& path, int64_t offset) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  const int byte = file.seekg(offset).get();
  file.seekp(offset).put(static_cast<char>(byte ^ 0x10));
  if (byte < 0 || !file.flush()) throw std::runtime_error("cannot change " + path);
}

}  // namespace bytecheckpoint::test
