// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/check/verify_job.h"

#include <unistd.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "csrc/engine/open/open_checkpoint.h"
#include "tests/cpp/aligned_bytes.h"
#include "tests/cpp/rounds.h"
#include "tests/cpp/saved_checkpoint.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

using test::SaveItem;
using test::TempDir;

const auto kGoOn = [](int64_t, int64_t) { return true; };

VerifyReport verified(const TempDir& dir, int num_threads = 3) {
  return test::value_of(verify_checkpoint({dir.path(), true, num_threads, 16 << 20}, kGoOn));
}

/// Repeats one page, because in a build without optimization a pattern for each byte would take most of the test's
/// time.
std::string repeated(size_t size, uint32_t seed) {
  const std::string page = test::patterned(4099, seed);
  std::string bytes;
  while (bytes.size() < size) bytes += page;
  bytes.resize(size);
  return bytes;
}

/// A one-dimensional tensor of bytes over `memory`.
SaveItem tensor_item(const std::string& fqn, std::string* memory) {
  const tensor::Dims sizes = {static_cast<int64_t>(memory->size())};
  return {fqn,
          sizes,
          tensor::whole(sizes),
          {reinterpret_cast<uint8_t*>(memory->data()), tensor::DType::kUInt8, sizes, {1}},
          {}};
}

/// Two ranks: a tensor of several segments, small ones, and an object.
struct Sample {
  std::string large = repeated((9 << 20) + 13, 1);
  std::string small = repeated(5000, 2);
  std::string other = repeated((1 << 20) + 4096, 3);
  TempDir dir{test::memory_root()};
  format::Manifest manifest;

  Sample() {
    test::PendingSave save =
        test::begin_save(test::commit_options(dir.path(), 1),
                         {{tensor_item("large", &large), tensor_item("small", &small)},
                          {tensor_item("other", &other), test::bytes_item(test::patterned(70000))}});
    EXPECT_OK(save.finish());
    manifest = test::value_of(open_checkpoint(dir.path(), {}));
  }

  /// The fqn whose record has the byte at `offset` of file `number`, or empty if there is none.
  std::string owner(size_t number, int64_t offset) const {
    for (const format::Item& item : manifest.items) {
      for (const format::Chunk& chunk : item.chunks) {
        const format::Record& record = chunk.record;
        if (record.file == number && offset >= record.offset && offset < record.offset + record.bytes) return item.fqn;
      }
    }
    return {};
  }
};

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

TEST_CASE("verify_job: a sound checkpoint has no problems, and all of it was read, whatever the number of threads") {
  const Sample sample;
  int64_t bytes = 0;
  for (const format::FileEntry& file : sample.manifest.files) bytes += file.bytes;
  for (const int num_threads : {1, 2, 5}) {
    const VerifyReport report = verified(sample.dir, num_threads);
    CHECK(report.problems.empty());
    CHECK(report.unreferenced.empty());
    CHECK(report.notes.empty());
    CHECK(report.num_files == 2);
    CHECK(report.num_records == 4);
    CHECK(report.bytes_checked == bytes);
    CHECK(report.save_ids == std::vector<std::string>{base::to_hex(test::save_id_of(1))});
  }
}

TEST_CASE("verify_job: a changed bit of any data file is a problem, with its file, extent and tensor") {
  const Sample sample;
  std::mt19937_64 random(7);
  for (int round = 0; round < test::rounds(40); ++round) {
    const size_t number = random() % sample.manifest.files.size();
    const format::FileEntry& file = sample.manifest.files[number];
    // Every other offset is near an end, where headers, tables and trailers are.
    const int64_t range = round % 2 == 0 ? file.bytes : std::min<int64_t>(file.bytes, 6000);
    const auto from_end = static_cast<int64_t>(random() % static_cast<uint64_t>(range));
    const int64_t offset = round % 4 == 1 ? from_end : file.bytes - 1 - from_end;
    INFO("byte " << offset << " of " << file.name);
    test::flip_bit(sample.dir / file.name, offset);
    const VerifyReport report = verified(sample.dir);
    test::flip_bit(sample.dir / file.name, offset);
    REQUIRE(report.problems.size() == 1);
    const Problem& problem = report.problems[0];
    CHECK(problem.file == file.name);
    CHECK_FALSE(problem.message.empty());
    if (problem.offset >= 0) {
      CHECK(problem.offset <= offset);
      CHECK((problem.bytes < 0 || offset < problem.offset + problem.bytes));
    }
    const std::string owner = sample.owner(number, offset);
    if (!owner.empty()) {
      CHECK(problem.section == "records");
      CHECK(has(problem.fqns, owner));
    }
  }
  CHECK(verified(sample.dir).problems.empty());
}

TEST_CASE("verify_job: goes on after a problem, and says all there are by file and offset") {
  const Sample sample;
  const format::Item& large = *std::find_if(sample.manifest.items.begin(), sample.manifest.items.end(),
                                            [](const format::Item& item) { return item.fqn == "large"; });
  const format::Record& record = large.chunks[0].record;
  const std::string& name = sample.manifest.files[record.file].name;
  const std::vector<int64_t> offsets = {record.data_offset, record.data_offset + (5 << 20),
                                        record.data_offset + record.data_bytes - 1};
  for (const int64_t offset : offsets) test::flip_bit(sample.dir / name, offset);
  const std::string& absent = sample.manifest.files[1 - record.file].name;
  REQUIRE(::unlink((sample.dir / absent).c_str()) == 0);

  std::vector<Problem> problems = verified(sample.dir).problems;
  REQUIRE(problems.size() == 4);
  const auto gone =
      std::find_if(problems.begin(), problems.end(), [&](const Problem& problem) { return problem.file == absent; });
  REQUIRE(gone != problems.end());
  CHECK(gone->section == "file");
  problems.erase(gone);
  for (size_t i = 0; i < offsets.size(); ++i) {
    CHECK(problems[i].file == name);
    CHECK(problems[i].offset <= offsets[i]);
    CHECK(offsets[i] < problems[i].offset + problems[i].bytes);
    CHECK(has(problems[i].fqns, "large"));
  }
}

TEST_CASE("verify_job: files that are cut, swapped or of another save") {
  const Sample sample, another;
  const std::string first = sample.dir / sample.manifest.files[0].name;
  const std::string second = sample.dir / sample.manifest.files[1].name;
  const std::string kept = test::read_all(first);
  for (const std::string& bytes : {kept.substr(0, kept.size() - 1), kept + '\0', std::string(), test::read_all(second),
                                   test::read_all(another.dir / another.manifest.files[0].name)}) {
    test::write_all(first, bytes);
    const VerifyReport report = verified(sample.dir);
    REQUIRE(report.problems.size() == 1);
    CHECK(report.problems[0].file == sample.manifest.files[0].name);
    CHECK(report.problems[0].section == "block table or trailer");
  }
}

TEST_CASE("verify_job: damaged metadata are one problem, of theirs; without them there is no checkpoint") {
  const Sample sample;
  const std::string mark = sample.dir / ".metadata";
  const auto size = static_cast<int64_t>(test::read_all(mark).size());
  for (const int64_t offset : {int64_t{0}, size / 4, size / 2, size - 1}) {
    test::flip_bit(mark, offset);
    const VerifyReport report = verified(sample.dir);
    test::flip_bit(mark, offset);
    REQUIRE(report.problems.size() == 1);
    CHECK(report.problems[0].file == ".metadata");
    CHECK(report.problems[0].section == "metadata");
    CHECK(report.unreferenced.empty());
  }
  REQUIRE(::unlink(mark.c_str()) == 0);
  EXPECT_CODE(kNotFound, verify_checkpoint({sample.dir.path()}, kGoOn));
}

TEST_CASE("verify_job: tells how far it is, and ends when told to") {
  const Sample sample;
  int64_t last = 0, total = 0;
  const auto follow = [&](int64_t done, int64_t all) {
    CHECK(done >= last);
    CHECK(done <= all);
    last = done;
    total = all;
    return true;
  };
  EXPECT_OK(verify_checkpoint({sample.dir.path(), true, 1, 16 << 20}, follow));
  CHECK(last == total);
  EXPECT_CODE(kCancelled,
              verify_checkpoint({sample.dir.path(), true, 3, 16 << 20}, [](int64_t, int64_t) { return false; }));
}

}  // namespace
}  // namespace bytecheckpoint::engine
