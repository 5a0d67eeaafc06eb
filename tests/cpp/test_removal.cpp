// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/commit/removal.h"

#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "csrc/engine/names.h"
#include "tests/cpp/saved_checkpoint.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

using test::TempDir;

base::Result<std::unique_ptr<Removal>> begin_at(const TempDir& dir) {
  return Removal::begin(std::make_shared<io::OpenDirectory>(test::value_of(io::OpenDirectory::open(dir.path()))));
}

TEST_CASE("removal: a save and a removal keep each other out") {
  const TempDir dir;
  auto removal = test::value_of(begin_at(dir));
  EXPECT_CODE(kBusy, Commit::begin(test::commit_options(dir.path(), 1)));
  EXPECT_CODE(kBusy, begin_at(dir));
  CHECK(dir.names() == std::vector<std::string>{removal->tmp()});
  removal.reset();
  CHECK(dir.names().empty());
  auto commit = test::value_of(Commit::begin(test::commit_options(dir.path(), 1)));
  EXPECT_CODE(kBusy, begin_at(dir));
  CHECK(dir.names().size() == 1);
}

TEST_CASE("removal: takes the marks, and leaves a free tmp behind unless it is finished") {
  const TempDir dir;
  for (const char* name : {".metadata", "__0.metadata", "__10.metadata", "__2.metadata", "__0_0.distcp"}) {
    test::write_all(dir / name, "x");
  }
  auto removal = test::value_of(begin_at(dir));
  const std::string tmp = removal->tmp();
  EXPECT_OK(removal->remove_marks());
  CHECK(dir.names() == std::vector<std::string>{tmp, "__0_0.distcp"});
  removal.reset();
  CHECK(test::read_all(dir / tmp) == kRemovalNote);
  CHECK((test::value_of(LockFile::probe(dir / tmp, false)) == LockFile::Probe::kFree));
  removal = test::value_of(begin_at(dir));
  EXPECT_OK(removal->remove_marks());
  EXPECT_OK(removal->finish());
  CHECK(dir.names() == std::vector<std::string>{tmp, "__0_0.distcp"});
}

TEST_CASE("removal: whose right is taken removes nothing") {
  const TempDir dir;
  test::write_all(dir / ".metadata", "x");
  auto removal = test::value_of(begin_at(dir));
  EXPECT_OK(removal->check_right());
  CommitOptions options = test::commit_options(dir.path(), 1);
  options.take_over = true;
  auto commit = test::value_of(Commit::begin(options));
  EXPECT_CODE(kSuperseded, removal->check_right());
  EXPECT_CODE(kSuperseded, removal->remove_marks());
  CHECK(dir.has(".metadata"));
}

}  // namespace
}  // namespace bytecheckpoint::engine
