// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/check/check_data_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "csrc/format/data_file.h"
#include "csrc/io/directory.h"
#include "tests/cpp/aligned_bytes.h"
#include "tests/cpp/saved_checkpoint.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

/// A data file of some blocks, and what its path is.
struct DataFile {
  DataFile() {
    const std::string content = test::patterned(5 * format::kBlockBytes + 77, 3);
    const auto result = test::value_of(test::write_items({test::bytes_item(content)}, test::save_options(dir.path())));
    path = io::join(dir.path(), result.files.at(0).name);
    bytes = result.files.at(0).bytes;
    fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    REQUIRE(fd >= 0);
  }
  ~DataFile() { ::close(fd); }

  void flip(int64_t at) const {
    uint8_t byte = 0;
    REQUIRE(::pread(fd, &byte, 1, at) == 1);
    byte ^= 1;
    REQUIRE(::pwrite(fd, &byte, 1, at) == 1);
  }

  test::TempDir dir;
  std::string path;
  int64_t bytes = 0;
  int fd = -1;
};

TEST_CASE("check_data_file: a whole file is fine, and a bit that is wrong anywhere is found") {
  const DataFile file;
  for (const int num_threads : {0, 1, 4}) EXPECT_OK(check_data_file(file.fd, "held://run/a", num_threads));
  const int64_t end = file.bytes - format::kDataTrailerBytes;
  for (const int64_t at :
       {int64_t{0}, int64_t{100}, format::kBlockBytes, 5 * format::kBlockBytes + 1, end - 3, end + 9, file.bytes - 1}) {
    CAPTURE(at);
    file.flip(at);
    const base::Status outcome = check_data_file(file.fd, "held://run/a", 3);
    CHECK(outcome.code() == base::Code::kCorrupt);
    CHECK(outcome.message().find("held://run/a") != std::string::npos);
    file.flip(at);
  }
  EXPECT_OK(check_data_file(file.fd, "held://run/a", 2));
}

TEST_CASE("check_data_file: a file that is cut short, or is none of ours, is not fine") {
  const DataFile file;
  for (const int64_t size : {file.bytes - 1, format::kHeaderBytes, int64_t{10}, int64_t{0}}) {
    CAPTURE(size);
    REQUIRE(::ftruncate(file.fd, size) == 0);
    CHECK(check_data_file(file.fd, "a", 2).code() == base::Code::kCorrupt);
  }
  CHECK(check_data_file(-1, "a", 2).code() == base::Code::kStorage);
}

}  // namespace
}  // namespace bytecheckpoint::engine
