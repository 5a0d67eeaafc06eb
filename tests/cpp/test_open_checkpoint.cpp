// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/open_checkpoint.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>

#include "tests/cpp/sample_file.h"
#include "tests/cpp/saved_checkpoint.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

using test::TempDir;

TEST_CASE("open_checkpoint: where there is none") {
  const TempDir dir;
  EXPECT_FAILURE(kNotFound, dir / ".metadata", open_checkpoint(dir.path()));
  EXPECT_CODE(kNotFound, open_checkpoint(dir / "absent"));
  test::write_all(dir / "file", "");
  EXPECT_CODE(kNotFound, open_checkpoint(dir / "file"));
  REQUIRE(::mkdir((dir / ".metadata").c_str(), 0700) == 0);
  EXPECT_CODE(kStorage, open_checkpoint(dir.path()));
}

TEST_CASE("open_checkpoint: one of ours that is cut or empty is damaged, not foreign") {
  const TempDir dir;
  test::save_checkpoint(dir.path(), 1, "content");
  const std::string good = test::read_all(dir / ".metadata");
  for (const size_t size : {size_t{0}, size_t{1}, good.size() / 2, good.size() - 1}) {
    CAPTURE(size);
    test::write_all(dir / ".metadata", good.substr(0, size));
    EXPECT_FAILURE(kCorrupt, dir / ".metadata", open_checkpoint(dir.path()));
  }
  test::write_all(dir / ".metadata", good);
  EXPECT_OK(open_checkpoint(dir.path()));
}

TEST_CASE("open_checkpoint: without data files the save id still tells that it was ours") {
  const TempDir dir, other;
  test::save_checkpoint(dir.path(), 1, "content");
  const std::string good = test::read_all(dir / ".metadata");
  test::write_all(other / ".metadata", good.substr(0, good.size() - 1));
  EXPECT_CODE(kCorrupt, open_checkpoint(other.path()));
}

TEST_CASE("open_checkpoint: another writer's metadata is read, unless it lies over our data") {
  const TempDir dir;
  test::write_all(dir / ".metadata", test::sample_file("stock.metadata"));
  test::write_all(dir / "__0_0.distcp", "PK\x03\x04");
  // Left from a save of ours, before stock DCP saved over it.
  test::write_all(dir / "__9_0.0123456789abcdef.distcp", format::encode_header({}));
  const format::Manifest manifest = test::value_of(open_checkpoint(dir.path()));
  CHECK(manifest.foreign.has_value());
  CHECK_FALSE(manifest.items.empty());

  test::write_all(dir / "__1_0.distcp", format::encode_header({}));
  EXPECT_FAILURE(kCorrupt, "accept_rewritten_metadata", open_checkpoint(dir.path()));
  EXPECT_OK(open_checkpoint(dir.path(), {{}, false, /*accept_rewritten=*/true}));
}

TEST_CASE("open_checkpoint: what is no metadata of anybody is refused, and told from ours") {
  const TempDir dir;
  test::write_all(dir / ".metadata", std::string("\x80\x04}.", 4));
  EXPECT_FAILURE(kCorrupt, dir / ".metadata", open_checkpoint(dir.path()));
  test::write_all(dir / ".metadata", std::string("\x80\x04\x8c\x05posix\x8c\x06system\x93.", 19));
  EXPECT_FAILURE(kUnsupported, "posix.system", open_checkpoint(dir.path()));
  test::write_all(dir / "__0_0.distcp", format::encode_header({}));
  EXPECT_FAILURE(kCorrupt, "trailer is missing", open_checkpoint(dir.path()));
}

TEST_CASE("open_checkpoint: the pickle is checked by who asks for it") {
  const TempDir dir;
  test::save_checkpoint(dir.path(), 1, "content");
  test::flip_bit(dir / ".metadata", 20);
  EXPECT_OK(open_checkpoint(dir.path()));
  EXPECT_FAILURE(kCorrupt, "pickle", open_checkpoint(dir.path(), {{}, /*check_pickle=*/true}));
}

TEST_CASE("open_checkpoint: the commit mark of a rank goes by its own name") {
  const TempDir dir;
  test::save_checkpoint(dir.path(), 1, "content");
  REQUIRE(::rename((dir / ".metadata").c_str(), (dir / "__3.metadata").c_str()) == 0);
  EXPECT_CODE(kNotFound, open_checkpoint(dir.path()));
  CHECK(test::value_of(open_checkpoint(dir.path(), {3})).save_id == test::save_id_of(1));
}

TEST_CASE("open_checkpoint: a mark that claims more than there is, or than memory holds, is not read into it") {
  const TempDir dir;
  constexpr int64_t kTera = int64_t{1} << 40;
  const auto claim = [&](const std::string& begin, const std::string& end) {
    test::write_all(dir / ".metadata", begin);
    REQUIRE(::truncate((dir / ".metadata").c_str(), kTera - static_cast<int64_t>(end.size())) == 0);
    std::ofstream(dir / ".metadata", std::ios::binary | std::ios::app) << end;
  };
  claim("", "");
  EXPECT_FAILURE(kCorrupt, "not metadata", open_checkpoint(dir.path()));
  claim("\x80\x04}", ".");
  const base::Status large = open_checkpoint(dir.path()).status();
  EXPECT_FAILURE(kStorage, "of memory are available", large);
  CHECK(large.sys_errno() == ENOMEM);
  test::save_checkpoint(dir.path(), 1, "content");
  const std::string good = test::read_all(dir / ".metadata");
  claim("\x80\x04}", good.substr(good.size() - format::kMetadataTrailerBytes));
  EXPECT_CODE(kCorrupt, open_checkpoint(dir.path()));
}

TEST_CASE("open_checkpoint: a mark that is a link is not followed") {
  const TempDir dir, other;
  test::save_checkpoint(other.path(), 1, "content");
  REQUIRE(::symlink((other / ".metadata").c_str(), (dir / ".metadata").c_str()) == 0);
  EXPECT_FAILURE(kCorrupt, "symbolic link", open_checkpoint(dir.path()));
}

}  // namespace
}  // namespace bytecheckpoint::engine
