// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/check/unreferenced.h"

#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "csrc/engine/commit/lock_file.h"
#include "tests/cpp/saved_checkpoint.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

using test::TempDir;
using Names = std::vector<std::string>;

const std::string kTmp = ".metadata.dddddddddddddddddddddddddddddddd.tmp";
const std::string kOurs = "__0_0.00000000deadbeef.distcp";
const std::string kOfStock = "__7_3.distcp";

Unreferenced found_in(const TempDir& dir) {
  return test::value_of(find_unreferenced(dir.path()));
}

/// Whether a note about `file` is among them.
bool is_noted(const Unreferenced& found, const std::string& file) {
  for (const std::string& note : found.notes) {
    if (note.rfind(file, 0) == 0) return true;
  }
  return false;
}

TEST_CASE("unreferenced: data files that no mark names, of any writer, and nothing else") {
  const TempDir dir;
  test::save_checkpoint(dir.path(), 1, "content");
  CHECK(found_in(dir).files.empty());
  for (const std::string& name : {kOfStock, kOurs, std::string("config.json"), std::string("distcp")}) {
    test::write_all(dir / name, "x");
  }
  REQUIRE(::symlink("/dev/null", (dir / "__8_0.distcp").c_str()) == 0);
  REQUIRE(::mkdir((dir / "__9_0.distcp").c_str(), 0700) == 0);
  const Unreferenced found = found_in(dir);
  CHECK(found.files == Names{kOurs, kOfStock});
  CHECK(found.notes.empty());
}

TEST_CASE("unreferenced: files of the mark of any rank are referred to") {
  const TempDir dir;
  for (const uint32_t rank : {0u, 3u}) {
    engine::CommitOptions options = test::commit_options(dir.path(), static_cast<uint8_t>(rank + 1));
    options.scope = rank;
    EXPECT_OK(test::begin_save(options, "content").finish());
  }
  test::write_all(dir / kOurs, "x");
  CHECK(found_in(dir).files == Names{kOurs});
}

TEST_CASE("unreferenced: nothing while a save is under way, or may be") {
  const TempDir dir;
  test::save_checkpoint(dir.path(), 1, "content");
  {
    test::PendingSave save = test::begin_save(test::commit_options(dir.path(), 2), "of the next");
    const Unreferenced found = found_in(dir);
    CHECK(found.files.empty());
    CHECK(is_noted(found, save.file_name()));
    EXPECT_OK(save.finish());
  }
  CHECK(found_in(dir).files.empty());
  CHECK(found_in(dir).notes.empty());

  test::write_all(dir / kOurs, "x");
  // left by a save that died; the one of stock DCP
  for (const std::string& tmp : {kTmp, std::string(".metadata.tmp")}) {
    test::write_all(dir / tmp, "x");
    const Unreferenced found = found_in(dir);
    CHECK(found.files.empty());
    CHECK(is_noted(found, tmp));
    CHECK(is_noted(found, kOurs));
    CHECK(dir.has(tmp));
    REQUIRE(::unlink((dir / tmp).c_str()) == 0);
  }
  CHECK(found_in(dir).files == Names{kOurs});
}

TEST_CASE("unreferenced: nothing while the save that has committed still holds its mark") {
  const TempDir dir;
  test::save_checkpoint(dir.path(), 1, "content");
  test::write_all(dir / kOurs, "x");
  LockFile lock = test::value_of(LockFile::create(dir / kTmp));
  test::write_all(dir / kTmp, test::read_all(dir / ".metadata"));
  REQUIRE(::rename((dir / kTmp).c_str(), (dir / ".metadata").c_str()) == 0);
  const Unreferenced found = found_in(dir);
  CHECK(found.files.empty());
  CHECK(is_noted(found, ".metadata"));
  CHECK(is_noted(found, kOurs));
  lock.release();
  CHECK(found_in(dir).files == Names{kOurs});
}

TEST_CASE("unreferenced: a mark that cannot be read is a note, a directory that cannot be listed an error") {
  const TempDir dir;
  test::save_checkpoint(dir.path(), 1, "content");
  test::write_all(dir / ".metadata", "no metadata");
  const Unreferenced found = found_in(dir);
  CHECK(found.files.empty());
  CHECK(found.notes.size() == 1);
  EXPECT_FAILURE(kStorage, "absent", find_unreferenced(dir / "absent"));
}

}  // namespace
}  // namespace bytecheckpoint::engine
