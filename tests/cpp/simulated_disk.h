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

/// What a file holds; shared by all trees that have it.
struct FileBytes {
  std::string bytes;
  uint64_t hash;
};
using Content = std::shared_ptr<const FileBytes>;
Content content_of(std::string bytes);

/// Directories and files by their paths below some root, which is itself not among them.
struct DiskTree {
  std::set<std::string> directories;
  std::map<std::string, Content> files;

  uint64_t hash() const;
};

/// A disk to which changes are done in the order of a journal, and what it may hold if the power fails then.
///
/// Weaker than any file system that keeps the promises of fsync, so that what survives it survives them:
///
/// - A name takes any of the values that it had since its directory was last synced, or the one it had then; each name
///   on its own. So creations, removals and the two halves of a rename are lost or kept in any order; a removed file
///   is back, a renamed one has both names or none. The name that a rename replaces is never gone: it had the old
///   value, then the new one. A sync of a file says nothing about its name, a sync of a directory nothing about its
///   own.
/// - In a part of the states, names instead are as they were at one time, no earlier than any sync: file systems that
///   keep a log of their metadata, as ext4 and xfs do.
/// - A file that was synced is whole. Later changes to it are lost or kept by the sector of 512 bytes, the page of 4
/// KiB
///   or as a whole, in any order; the size is any that it had since, or ends at a sector in between. A sector beyond
///   the size that was synced may also be zeros (reserved, or extended, and not written) or what lay on the disk
///   before: the bytes of another file at the same place.
/// - A disk keeps what it said was synced, writes a sector whole or not at all, and gives the blocks of a removed file
///   to another only once the removal cannot be undone.
///
/// Semantics in the spirit of ALICE (OSDI'14) and CrashMonkey (OSDI'18). Copies share their files.
class SimulatedDisk {
 public:
  /// \param root     Changes below it are followed. Syncs elsewhere are passed over.
  /// \param durable  What is on the disk, and was synced.
  explicit SimulatedDisk(std::string root, const DiskTree& durable = {});

  void apply(const io::FileSystemChange& change);

  /// What a process sees.
  DiskTree latest() const;

  /// Combinations of values of names with the contents that each file had after one of its changes, or with its sectors
  /// all zeros: no torn files. Saturates at kManyLandmarks.
  int64_t num_landmarks() const;
  static constexpr int64_t kManyLandmarks = int64_t{1} << 40;
  /// \param index  0: all that was not synced is lost.
  DiskTree landmark(int64_t index) const;

  /// Any state, torn files included.
  DiskTree random_tree(std::mt19937_64* random) const;

 private:
  static constexpr int kNothing = -1;

  struct Node {
    bool is_directory = false;
    std::vector<Content> versions;  // of a file: synced, then after each change since
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
  /// \param value_of  Which of the values of a name; \param content_of_file  What a file holds.
  template <class ValueOf, class ContentOf>
  DiskTree tree(ValueOf&& value_of, ContentOf&& content_of_file) const;

  std::string root_;
  int64_t time_ = 0;
  std::map<std::string, std::vector<Value>> names_;  // at the last sync of its directory, then since
  std::vector<Node> nodes_;
  std::unordered_map<uint64_t, int> node_of_inode_;
};

}  // namespace bytecheckpoint::test
