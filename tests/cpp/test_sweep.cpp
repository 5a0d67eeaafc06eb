// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/commit/sweep.h"

#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "csrc/engine/commit/lock_file.h"
#include "csrc/engine/open/open_checkpoint.h"
#include "csrc/io/directory.h"
#include "tests/cpp/saved_checkpoint.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

using test::TempDir;

const std::string kDead = "__0_0.00000000deadbeef.distcp";
const std::string kDeadToo = "__7_12.11111111deadbeef.distcp";
const std::string kDeadTmp = ".metadata.dddddddddddddddddddddddddddddddd.tmp";

/// Sweeps for a save that begins, whose tmp is gone afterwards.
SweepReport swept(const TempDir& dir, const std::vector<std::string>& own_files = {}) {
  const std::string own_tmp = tmp_name(test::save_id_of(99));
  test::write_all(dir / own_tmp, "");
  const SweepReport report = test::value_of(sweep(dir.path(), own_tmp, own_files));
  REQUIRE(::unlink((dir / own_tmp).c_str()) == 0);
  return report;
}

TEST_CASE("sweep: takes the files and tmps of dead saves and leaves the checkpoint") {
  const TempDir dir;
  const std::string file = test::save_checkpoint(dir.path(), 1, "content");
  for (const std::string& name : {kDead, kDeadToo, kDeadTmp, "__3" + kDeadTmp}) test::write_all(dir / name, "x");
  const SweepReport report = swept(dir);
  CHECK(report.files_removed == 2);
  CHECK(report.tmps_removed == 2);
  CHECK(report.declined.empty());
  CHECK(dir.names() == std::vector<std::string>{".metadata", file});
}

TEST_CASE("sweep: takes what dead saves left where there never was a checkpoint") {
  const TempDir dir;
  test::write_all(dir / kDead, "x");
  test::write_all(dir / kDeadTmp, "x");
  CHECK(swept(dir).files_removed == 1);
  CHECK(dir.names().empty());
}

TEST_CASE("sweep: leaves the caller's own tmp and files") {
  const TempDir dir;
  for (const std::string& name : {kDead, kDeadToo}) test::write_all(dir / name, "x");
  const SweepReport report = swept(dir, {kDead});
  CHECK(report.files_removed == 1);
  CHECK(report.tmps_removed == 0);
  CHECK(dir.names() == std::vector<std::string>{kDead});
}

TEST_CASE("sweep: a save whose tmp another one removed deletes nothing, and hears of it") {
  const TempDir dir;
  for (const std::string& name : {kDead, kDeadTmp}) test::write_all(dir / name, "x");
  EXPECT_FAILURE(kBusy, tmp_name(test::save_id_of(9)), sweep(dir.path(), tmp_name(test::save_id_of(9)), {}));
  CHECK(dir.names() == std::vector<std::string>{kDeadTmp, kDead});
}

TEST_CASE("sweep: a save that has committed takes no right away, and deletes nothing while another one has it") {
  const TempDir dir;
  const std::string file = test::save_checkpoint(dir.path(), 1, "content");
  for (const std::string& name : {kDead, kDeadTmp}) test::write_all(dir / name, "x");
  const SweepReport declined = test::value_of(sweep(dir.path(), "", {file}));
  CHECK(test::contains(declined.declined, kDeadTmp));
  CHECK(declined.files_removed == 0);
  CHECK(dir.has(kDeadTmp));
  REQUIRE(::unlink((dir / kDeadTmp).c_str()) == 0);
  CHECK(test::value_of(sweep(dir.path(), "", {file})).files_removed == 1);
  CHECK(dir.names() == std::vector<std::string>{".metadata", file});
}

TEST_CASE(
    "sweep: deletes nothing while a commit mark that is listed cannot be found, as a server may say of one that is") {
  for (const std::string& mark : {std::string(".metadata"), std::string("__3.metadata")}) {
    const TempDir dir;
    test::write_all(dir / kDead, "x");
    REQUIRE(::symlink("nothing", (dir / mark).c_str()) == 0);
    const SweepReport declined = test::value_of(sweep(dir.path(), "", {}));
    CHECK(test::contains(declined.declined, mark));
    CHECK(declined.files_removed == 0);
    CHECK(dir.has(kDead));
    REQUIRE(::unlink((dir / mark).c_str()) == 0);
    CHECK(test::value_of(sweep(dir.path(), "", {})).files_removed == 1);
  }
}

TEST_CASE("sweep: deletes no data file while another save lives, but the tmps of dead ones") {
  const TempDir dir;
  test::write_all(dir / kDead, "x");
  test::write_all(dir / kDeadTmp, "x");
  const std::string live = tmp_name(test::save_id_of(9));
  const LockFile lock = test::value_of(LockFile::create(dir / live));
  const SweepReport report = swept(dir);
  CHECK(test::contains(report.declined, live));
  CHECK(report.files_removed == 0);
  CHECK(dir.names() == std::vector<std::string>{live, kDead});
}

TEST_CASE("sweep: deletes nothing if a commit mark cannot be read") {
  for (const char* mark : {".metadata", "__2.metadata"}) {
    for (const std::string& content : {std::string(), std::string("\x80\x04}.", 4), std::string(5000, 'x')}) {
      const TempDir dir;
      test::write_all(dir / mark, content);
      test::write_all(dir / kDead, "x");
      const SweepReport report = swept(dir);
      CHECK_FALSE(report.declined.empty());
      CHECK(report.files_removed == 0);
      CHECK(dir.has(kDead));
    }
  }
  const TempDir dir;
  REQUIRE(::mkdir((dir / ".metadata").c_str(), 0700) == 0);
  test::write_all(dir / kDead, "x");
  CHECK_FALSE(swept(dir).declined.empty());
  CHECK(dir.has(kDead));
}

TEST_CASE("sweep: what a rank's own commit mark names is kept") {
  const TempDir dir;
  const std::string file = test::save_checkpoint(dir.path(), 1, "content");
  REQUIRE(::rename((dir / ".metadata").c_str(), (dir / "__0.metadata").c_str()) == 0);
  test::write_all(dir / kDead, "x");
  CHECK(swept(dir).files_removed == 1);
  CHECK(dir.has(file));
}

TEST_CASE("sweep: never touches names that are not ours, links and directories") {
  const TempDir dir;
  const std::vector<std::string> foreign = {"__0_0.distcp",    "model.pt",      "__0_0.00000000DEADBEEF.distcp",
                                            kDead + ".bak",    ".metadata.tmp", "x" + kDead,
                                            ".metadata.backup"};
  for (const std::string& name : foreign) test::write_all(dir / name, "x");
  REQUIRE(::symlink("model.pt", (dir / "__1_0.00000000deadbeef.distcp").c_str()) == 0);
  REQUIRE(::symlink("nowhere", (dir / "__2_0.00000000deadbeef.distcp").c_str()) == 0);
  REQUIRE(::mkdir((dir / "__3_0.00000000deadbeef.distcp").c_str(), 0700) == 0);
  REQUIRE(::mkdir((dir / "sub").c_str(), 0700) == 0);
  test::write_all(dir / ("sub/" + kDead), "x");
  const std::vector<std::string> before = dir.names();
  test::write_all(dir / kDead, "x");
  CHECK(swept(dir).files_removed == 1);
  CHECK(dir.names() == before);
  CHECK(dir.has("sub/" + kDead));
}

TEST_CASE("sweep: a directory that is not there is an error") {
  const TempDir dir;
  EXPECT_CODE(kStorage, sweep(dir / "absent", "", {}));
}

TEST_CASE("sweep: a directory with the name of a tmp is no save, and stops none") {
  const TempDir dir;
  const std::string name = tmp_name(test::save_id_of(9));
  REQUIRE(::mkdir((dir / name).c_str(), 0700) == 0);
  test::save_checkpoint(dir.path(), 1, "one");
  test::save_checkpoint(dir.path(), 2, "two");
  CHECK(dir.has(name));
  const format::Manifest manifest = test::value_of(open_checkpoint(dir.path()));
  size_t data_files = 0;
  for (const std::string& entry : test::value_of(io::list_directory(dir.path()))) {
    data_files += format::is_data_file_name(entry);
  }
  CHECK(data_files == manifest.files.size());
}

}  // namespace
}  // namespace bytecheckpoint::engine
