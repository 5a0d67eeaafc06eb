// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/open_beneath.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "tests/cpp/expect.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::io {
namespace {

using namespace std::string_literals;  // NOLINT: a name holds a zero

/// A directory with a file, a directory with a file, links of all kinds and a FIFO, and a file beside it that must not
/// be opened.
class Tree {
 public:
  Tree() {
    REQUIRE(::mkdir((root_ / "in").c_str(), 0777) == 0);
    REQUIRE(::mkdir((root_ / "in/below").c_str(), 0777) == 0);
    for (const char* name : {"outside", "in/file", "in/below/file"}) test::write_all(root_ / name, name);
    link("../outside", "out");
    link(root_ / "outside", "absolute");
    link("file", "link");
    link("link", "chain");
    link("loop", "loop");
    link("below", "way");
    link("..", "up");
    link("/proc/self/root", "root");
    REQUIRE(::mkfifo((root_ / "in/fifo").c_str(), 0666) == 0);
    fd_ = ::open((root_ / "in").c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
    REQUIRE(fd_ >= 0);
  }
  ~Tree() { ::close(fd_); }
  Tree(const Tree&) = delete;
  Tree& operator=(const Tree&) = delete;

  int fd() const { return fd_; }
  std::string outside() const { return root_ / "outside"; }

 private:
  void link(const std::string& target, const char* name) const {
    REQUIRE(::symlink(target.c_str(), (root_ / "in/" + name).c_str()) == 0);
  }

  const test::TempDir root_;
  int fd_ = -1;
};

using Open = int (*)(int, const std::string&, int);

/// Returns what is read through `name`, or the errno.
std::string outcome(Open open, const Tree& tree, const std::string& name) {
  const int fd = open(tree.fd(), name, O_RDONLY);
  if (fd < 0) return ::strerrorname_np(errno);
  char bytes[64];
  const ssize_t got = ::read(fd, bytes, sizeof bytes);
  ::close(fd);
  return got < 0 ? "unreadable" : std::string(bytes, static_cast<size_t>(got));
}

TEST_CASE("beneath: files below the directory are opened, and nothing else, in both ways") {
  const Tree tree;
  for (const Open open : {&open_beneath, &open_beneath_by_steps}) {
    CAPTURE(open == &open_beneath);
    CHECK(outcome(open, tree, "file") == "in/file");
    CHECK(outcome(open, tree, "./file") == "in/file");
    CHECK(outcome(open, tree, "below/file") == "in/below/file");
    CHECK(outcome(open, tree, "below//file") == "in/below/file");
    for (const std::string& name :
         {"../outside"s, "below/../../outside"s, "below/../file"s, tree.outside(), "/"s, ".."s}) {
      CAPTURE(name);
      CHECK(outcome(open, tree, name) == "EXDEV");
    }
    for (const char* name : {"out", "absolute", "link", "chain", "loop", "way/file", "up/outside", "root/etc/passwd"}) {
      CAPTURE(name);
      const std::string error = outcome(open, tree, name);
      CHECK((error == "ELOOP" || error == "ENOTDIR"));
    }
    CHECK(outcome(open, tree, "") == "EINVAL");
    CHECK(outcome(open, tree, "file\0"s) == "EINVAL");
    CHECK(outcome(open, tree, "no such file") == "ENOENT");
    CHECK(outcome(open, tree, std::string(5000, 'x')) == "ENAMETOOLONG");
    CHECK(outcome(open, tree, "fifo").empty());
  }
}

TEST_CASE("beneath: no descriptor is left, whatever comes of it") {
  const Tree tree;
  const int before = ::dup(tree.fd());
  ::close(before);
  for (const Open open : {&open_beneath, &open_beneath_by_steps}) {
    for (const char* name : {"file", "below/file", "below/none", "way/file", "below/../../x", "a/b/c/d"}) {
      (void)outcome(open, tree, name);
    }
  }
  const int after = ::dup(tree.fd());
  ::close(after);
  CHECK(after == before);
}

}  // namespace
}  // namespace bytecheckpoint::io
