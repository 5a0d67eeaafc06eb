// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/io/journal.h"

namespace bytecheckpoint::test {

/// Content of a file, shared by all trees that have it.
struct FileBytes {
  std::string bytes;
  uint64_t hash;
};
using Content = std::shared_ptr<const FileBytes>;
Content content_of(std::string bytes);

/// Directories and files by their paths relative to some root, which is not in the set.
struct DiskTree {
  std::set<std::string> directories;
  std::map<std::string, Content> files;

  uint64_t hash() const;
};

/// A disk to which the changes of a journal are applied in order, and all states it may be in if the power then fails.
///
/// It promises less than any file system that keeps the promises of fsync, so code that survives it survives those:
///
/// - A name takes the value that it had when its directory was last synced, or any value since, independently of other
///   names. So creations, removals and the two halves of a rename are lost or kept in any order; a removed file may be
///   back, a renamed one may have both names or none. The name that a rename replaces never disappears: it has the old
///   value or the new one. A sync of a file does not cover its name, and a sync of a directory does not cover its own
///   name.
/// - In some of the states, all names are instead as they were at one moment, no earlier than any sync. File systems
///   with a metadata log, such as ext4 and xfs, behave like this.
/// - A synced file is whole. Later changes to it are lost or kept by sectors of 512 bytes, by pages of 4 KiB or as a
///   whole, in any order. Its size is any that it had since, or ends at a sector in between. A sector beyond the synced
///   size may also be zeros (reserved or extended, but not written) or what lay on the disk before: the bytes of
///   another file at the same place.
/// - A disk keeps what it reported as synced, writes a sector whole or not at all, and gives the blocks of a removed
///   file to another file only once the removal cannot be undone.
///
/// The semantics follow ALICE (OSDI'14) and CrashMonkey (OSDI'18). Copies share their files.
class SimulatedDisk {
 public:
  /// \param root     Follows changes below it, and ignores syncs elsewhere.
  /// \param durable  The synced content of the disk.
  explicit SimulatedDisk(std::string root, const DiskTree& durable = {});

  void apply(const io::FileSystemChange& change);

  /// The tree that a process sees.
  DiskTree latest() const;

  /// Number of combinations of name values with file contents, where a file has its content after one of its changes,
  /// or all sectors zero. There are no torn files. Saturates at kManyLandmarks.
  int64_t num_landmarks() const;
  static constexpr int64_t kManyLandmarks = int64_t{1} << 40;
  /// \param index  At 0, everything that was not synced is lost.
  DiskTree landmark(int64_t index) const;

  /// Any state, including torn files.
  DiskTree random_tree(std::mt19937_64* random) const;

 private:
  static constexpr int kNothing = -1;

  struct Node {
    bool is_directory = false;
    std::vector<Content> versions;  // of a file: the synced content, then the content after each later change
  };
  struct Value {
    int64_t time;
    int node;
  };

  bool is_below_root(const std::string& path) const;
  std::string relative(const std::string& path) const;
  int node_at(const std::string& path) const;
  int add_node(Node node);
  void set_name(const std::string& path, int node);
  void change_file(uint64_t inode, std::string bytes);
  const Node& file_of(uint64_t inode) const;
  Content zeroed(const Node& node) const;
  Content torn(const Node& node, std::mt19937_64* random) const;
  /// \param value_of  Picks one of a name's values. \param content_of_file  Picks the content of a file.
  template <class ValueOf, class ContentOf>
  DiskTree tree(ValueOf&& value_of, ContentOf&& content_of_file) const;

  std::string root_;
  int64_t time_ = 0;
  std::map<std::string, std::vector<Value>> names_;  // at the last sync of its directory, then since
  std::vector<Node> nodes_;
  std::unordered_map<uint64_t, int> node_of_inode_;
};

}  // namespace bytecheckpoint::test
