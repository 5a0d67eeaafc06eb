// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/check/inspect_folder.h"

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

const std::string kTmp = ".metadata.dddddddddddddddddddddddddddddddd.tmp";

FolderInspection inspected(const TempDir& dir, const std::string& own_tmp = {}) {
  return test::value_of(inspect_folder(dir.path(), own_tmp));
}

TEST_CASE("inspect_folder: a checkpoint, and what lies beside it by what it is") {
  const TempDir dir;
  const std::string file = test::save_checkpoint(dir.path(), 1, "content");
  for (const std::string& name : {kTmp, std::string("__0_0.00000000deadbeef.distcp"), std::string("config.json")}) {
    test::write_all(dir / name, "x");
  }
  const FolderInspection found = inspected(dir);
  CHECK((found.state == FolderState::kComplete));
  CHECK(found.reason.empty());
  CHECK_FALSE(found.is_being_saved);
  CHECK_FALSE(found.is_foreign);
  CHECK(found.save_ids == std::vector<std::string>{base::to_hex(test::save_id_of(1))});
  CHECK(found.num_files == 1);
  CHECK(found.marks == std::vector<std::string>{".metadata"});
  CHECK(found.tmps == std::vector<std::string>{kTmp});
  CHECK(found.data_files.size() == 2);
  CHECK(found.others == std::vector<std::string>{"config.json"});
}

TEST_CASE("inspect_folder: a file that is missing, or cut, makes it corrupt") {
  for (const bool is_missing : {true, false}) {
    const TempDir dir;
    const std::string file = test::save_checkpoint(dir.path(), 1, "content");
    REQUIRE((is_missing ? ::unlink((dir / file).c_str()) : ::truncate((dir / file).c_str(), 4096)) == 0);
    const FolderInspection found = inspected(dir);
    CHECK((found.state == FolderState::kCorrupt));
    CHECK(test::contains(found.reason, file));
  }
}

TEST_CASE("inspect_folder: files of ranks that have disks of their own are not looked for") {
  const TempDir dir;
  const std::string file = test::save_checkpoint(dir.path(), 1, "content");
  REQUIRE(::unlink((dir / file).c_str()) == 0);
  CHECK((test::value_of(inspect_folder(dir.path(), "", RanksHere({0}))).state == FolderState::kCorrupt));
  CHECK((test::value_of(inspect_folder(dir.path(), "", RanksHere({1}))).state == FolderState::kComplete));
}

TEST_CASE("inspect_folder: without a mark it is half, or being saved, or nothing of ours") {
  const TempDir dir;
  CHECK((inspected(dir).state == FolderState::kHalf));
  test::write_all(dir / "notes", "x");
  CHECK((inspected(dir).state == FolderState::kUnknown));
  test::write_all(dir / "__0_0.distcp", "x");
  CHECK((inspected(dir).state == FolderState::kHalf));
  {
    const LockFile lock = test::value_of(LockFile::create(dir / kTmp));
    CHECK((inspected(dir).state == FolderState::kSaving));
    CHECK((inspected(dir, kTmp).state == FolderState::kHalf));
  }
  CHECK((inspected(dir).state == FolderState::kHalf));
}

TEST_CASE("inspect_folder: what cannot be listed is a failure") {
  const TempDir dir;
  EXPECT_CODE(kStorage, inspect_folder(dir / "none"));
}

}  // namespace
}  // namespace bytecheckpoint::engine
