// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/simulated_disk.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "tests/cpp/aligned_bytes.h"
#include "tests/cpp/shown_tree.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::test {
namespace {

using Kind = io::FileSystemChange::Kind;

/// A disk with short names for changes.
struct Disk : SimulatedDisk {
  Disk() : SimulatedDisk("/disk") {}
  void create(const std::string& path, uint64_t inode) {
    apply({Kind::kCreateFile, "/disk/" + path, "", inode, 0, ""});
  }
  void write(uint64_t inode, const std::string& bytes, int64_t offset = 0) {
    apply({Kind::kWrite, "", "", inode, offset, bytes});
  }
  void truncate(uint64_t inode, int64_t size) { apply({Kind::kTruncate, "", "", inode, size, ""}); }
  void sync(uint64_t inode) { apply({Kind::kSyncFile, "", "", inode, 0, ""}); }
  void make(const std::string& path) { apply({Kind::kMakeDirectory, "/disk/" + path, "", 0, 0, ""}); }
  void rename(const std::string& from, const std::string& to) {
    apply({Kind::kRename, "/disk/" + from, "/disk/" + to, 0, 0, ""});
  }
  void link(const std::string& from, const std::string& to) {
    apply({Kind::kLink, "/disk/" + from, "/disk/" + to, 0, 0, ""});
  }
  void remove(const std::string& path) { apply({Kind::kRemoveFile, "/disk/" + path, "", 0, 0, ""}); }
  void sync_names(const std::string& path = "/disk") { apply({Kind::kSyncDirectory, path, "", 0, 0, ""}); }
  /// Adds a file with a name, both synced.
  void have(const std::string& path, uint64_t inode, const std::string& bytes) {
    create(path, inode);
    write(inode, bytes);
    sync(inode);
    sync_names();
  }
};

std::string text_of(const DiskTree& tree) {
  std::string out;
  for (const std::string& path : tree.directories) out += path + "/ ";
  for (const auto& [path, content] : tree.files) out += path + "=" + content->bytes.substr(0, 8) + " ";
  return out;
}

std::set<std::string> landmarks_of(const Disk& disk) {
  std::set<std::string> out;
  for (int64_t i = 0; i < disk.num_landmarks(); ++i) out.insert(text_of(disk.landmark(i)));
  return out;
}

std::set<std::string> random_trees_of(const Disk& disk, int draws = 300) {
  std::mt19937_64 random(1);
  std::set<std::string> out;
  for (int i = 0; i < draws; ++i) out.insert(text_of(disk.random_tree(&random)));
  return out;
}

using Trees = std::set<std::string>;

TEST_CASE("simulated_disk: what was synced with its name is there, whatever happens") {
  Disk disk;
  disk.have("a", 1, "one");
  CHECK(landmarks_of(disk) == Trees{"a=one "});
  CHECK(random_trees_of(disk) == Trees{"a=one "});
}

TEST_CASE("simulated_disk: a synced file may have no name, a synced name no bytes") {
  Disk disk;
  disk.create("a", 1);
  disk.write(1, "one");
  disk.sync(1);
  CHECK(landmarks_of(disk) == Trees{"", "a=one "});
  disk.create("b", 2);
  disk.write(2, "two");
  disk.sync_names();
  const std::string zeros(3, '\0');
  CHECK(landmarks_of(disk) == Trees{"a=one b= ", "a=one b=two ", "a=one b=" + zeros + " "});
}

TEST_CASE("simulated_disk: a rename never leaves the replaced name empty, and may leave both") {
  Disk disk;
  disk.have("new", 1, "n");
  disk.have("old", 2, "o");
  disk.rename("new", "old");
  const Trees possible = {"new=n old=o ", "new=n old=n ", "old=o ", "old=n "};
  CHECK(landmarks_of(disk) == possible);
  CHECK(random_trees_of(disk) == possible);
  disk.sync_names();
  CHECK(landmarks_of(disk) == Trees{"old=n "});
}

TEST_CASE("simulated_disk: two names of one file show the same bytes") {
  Disk disk;
  disk.have("a", 1, "old");
  disk.link("a", "b");
  disk.sync_names();
  disk.write(1, "new");
  CHECK(landmarks_of(disk) == Trees{"a=old b=old ", "a=new b=new "});
}

TEST_CASE("simulated_disk: removals are lost or kept in any order") {
  Disk disk;
  disk.have("a", 1, "1");
  disk.have("b", 2, "2");
  disk.remove("a");
  disk.remove("b");
  CHECK(landmarks_of(disk) == Trees{"a=1 b=2 ", "a=1 ", "b=2 ", ""});
  CHECK(text_of(disk.latest()).empty());
}

TEST_CASE("simulated_disk: what is in a directory goes with the directory's own name") {
  Disk disk;
  disk.make("d");
  disk.create("d/a", 1);
  disk.sync(1);
  disk.sync_names("/disk/d");
  CHECK(landmarks_of(disk) == Trees{"", "d/ d/a= "});
  disk.sync_names("/elsewhere");
  disk.sync_names();
  CHECK(landmarks_of(disk) == Trees{"d/ d/a= "});
}

TEST_CASE("simulated_disk: an overwrite is old or new sector by sector, never zeros, and the size is one that it had") {
  const std::string old_bytes(4096, 'o'), new_bytes(4096, 'n');
  Disk disk;
  disk.have("a", 1, old_bytes);
  disk.write(1, new_bytes);
  std::mt19937_64 random(1);
  std::set<std::string> seen;
  for (int i = 0; i < 500; ++i) {
    const std::string bytes = disk.random_tree(&random).files.at("a")->bytes;
    REQUIRE(bytes.size() == 4096);
    for (size_t sector = 0; sector < 8; ++sector) {
      const std::string part = bytes.substr(512 * sector, 512);
      REQUIRE((part == old_bytes.substr(0, 512) || part == new_bytes.substr(0, 512)));
    }
    seen.insert(bytes);
  }
  CHECK(seen.size() > 100);
}

TEST_CASE("simulated_disk: what was never on the disk is new, zeros, or what lay there before") {
  const std::string other = patterned(4096, 1), bytes = patterned(3000, 2);
  Disk disk;
  disk.have("other", 1, other);
  disk.create("a", 2);
  disk.sync_names();
  disk.write(2, bytes);
  std::mt19937_64 random(1);
  bool is_whole = false, has_zeros = false, has_stale = false;
  std::set<size_t> sizes;
  for (int i = 0; i < 2000; ++i) {
    const std::string found = disk.random_tree(&random).files.at("a")->bytes;
    sizes.insert(found.size());
    for (size_t begin = 0; begin < found.size(); begin += 512) {
      const size_t size = std::min<size_t>(512, found.size() - begin);
      const std::string part = found.substr(begin, size);
      const bool is_zeros = part == std::string(size, '\0'), is_stale = part == other.substr(begin, size);
      REQUIRE((is_zeros || is_stale || part == bytes.substr(begin, size)));
      has_zeros |= is_zeros;
      has_stale |= is_stale;
    }
    is_whole |= found == bytes;
  }
  CHECK(is_whole);
  CHECK(has_zeros);
  CHECK(has_stale);
  CHECK(sizes == std::set<size_t>{0, 512, 1024, 1536, 2048, 2560, 3000});
}

TEST_CASE("simulated_disk: a file that is cut may have kept its length") {
  Disk disk;
  disk.have("a", 1, "12345678");
  disk.truncate(1, 4);
  CHECK(landmarks_of(disk) == Trees{"a=12345678 ", "a=1234 "});
  disk.sync(1);
  CHECK(landmarks_of(disk) == Trees{"a=1234 "});
}

TEST_CASE("simulated_disk: an inode number that is given again is another file") {
  Disk disk;
  disk.have("a", 1, "old");
  disk.remove("a");
  disk.create("b", 1);
  disk.write(1, "new");
  const Trees trees = landmarks_of(disk);
  CHECK(trees.count("a=old b=new ") == 1);
  CHECK(trees.count("a=new ") == 0);
}

TEST_CASE("shown_tree: a real directory becomes one tree after another") {
  const TempDir dir;
  write_all(dir / "before", "x");
  ShownTree shown(dir.path());
  const Content one = content_of("one"), longer = content_of("longer");
  shown.show({{"d", "d/e"}, {{"d/e/a", one}, {"b", one}}});
  CHECK(dir.names() == std::vector<std::string>{"b", "d"});
  CHECK(read_all(dir / "d/e/a") == "one");
  shown.show({{"d"}, {{"b", longer}, {"d/c", one}}});
  CHECK(read_all(dir / "b") == "longer");
  CHECK(read_all(dir / "d/c") == "one");
  CHECK_FALSE(dir.has("d/e"));
  write_all(dir / "b", "somebody's");
  shown.forget();
  shown.show({{}, {{"b", one}}});
  CHECK(dir.names() == std::vector<std::string>{"b"});
  CHECK(read_all(dir / "b") == "one");
}

}  // namespace
}  // namespace bytecheckpoint::test
