// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/save/filled_records.h"

#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/engine/save/save_job.h"
#include "csrc/format/data_file.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/memory_holder.h"
#include "tests/cpp/random_box.h"
#include "tests/cpp/rounds.h"
#include "tests/cpp/temp_dir.h"

namespace bytecheckpoint::engine {
namespace {

using format::RecordKind;
using test::draw;
using test::Random;
using test::TempDir;

/// Records to write, with the bytes that they get.
struct Records {
  std::vector<std::string> fqns, bytes;
  std::vector<tensor::Box> boxes;
  std::vector<RecordKind> kinds;

  void add(RecordKind kind, int64_t num_bytes, Random* random) {
    std::string content(static_cast<size_t>(num_bytes), '\0');
    for (size_t at = 0; at < content.size(); at += 8) {
      const uint64_t word = (*random)();
      std::memcpy(content.data() + at, &word, std::min<size_t>(8, content.size() - at));
    }
    fqns.push_back(base::text("record.", fqns.size()));
    bytes.push_back(std::move(content));
    kinds.push_back(kind);
    boxes.push_back(kind == RecordKind::kBytes ? tensor::Box{} : tensor::whole({num_bytes}));
  }
};

/// Records whose heads, data and tails begin and end around the ends of slots.
Records draw_records(Random* random) {
  Records records;
  const RecordKind kinds[] = {RecordKind::kTensor, RecordKind::kTensor, RecordKind::kBytes, RecordKind::kOpaque};
  for (int64_t left = draw(random, 1, 3) * staging::kSlotBytes; left > 0; left -= staging::kSlotBytes) {
    const int64_t large = draw(random, 0, 2) * staging::kSlotBytes - draw(random, 0, 3000);
    records.add(kinds[draw(random, 0, 3)], std::max<int64_t>(0, large), random);
    for (int64_t i = draw(random, 0, 12); i > 0; --i) {
      records.add(kinds[draw(random, 0, 3)], draw(random, 0, 3) == 0 ? 0 : draw(random, 1, 700), random);
    }
  }
  return records;
}

SaveOptions options_for(const TempDir& dir, bool is_plain, Random* random) {
  SaveOptions options;
  options.directory = dir.path();
  options.is_plain = is_plain;
  options.num_io_threads = 2;
  options.ring_bytes = draw(random, 2, 4) * staging::kSlotBytes;
  return options;
}

format::WriteResult write_in_turn(const SaveOptions& options, const Records& records) {
  const auto job = test::value_of(SaveJob::start(options));
  for (size_t r = 0; r < records.fqns.size(); ++r) {
    const std::string& bytes = records.bytes[r];
    if (records.kinds[r] == RecordKind::kTensor) {
      tensor::StridedView view{reinterpret_cast<uint8_t*>(const_cast<char*>(bytes.data())), tensor::DType::kUInt8,
                               records.boxes[r].sizes, tensor::Dims{1}};
      EXPECT_OK(job->append_tensor(records.fqns[r], records.boxes[r], view));
    } else if (records.kinds[r] == RecordKind::kBytes) {
      EXPECT_OK(job->append_bytes(records.fqns[r], bytes));
    } else {
      EXPECT_OK(job->append_opaque(records.fqns[r], records.boxes[r], bytes));
    }
  }
  return test::value_of(job->finish());
}

/// Fills what is wanted in the opposite order, as late as it may.
format::WriteResult write_filled(const SaveOptions& options, const Records& records, int slots_a_run) {
  struct Wanted {
    size_t record;
    int64_t begin, end;
    uint8_t* to;
  };
  std::vector<Wanted> wanted;
  std::vector<int64_t> filled(records.fqns.size());
  std::vector<RecordToFill> to_fill;
  for (size_t r = 0; r < records.fqns.size(); ++r) {
    to_fill.push_back({&records.fqns[r], &records.boxes[r], records.kinds[r], tensor::DType::kUInt8,
                       static_cast<int64_t>(records.bytes[r].size())});
  }
  const RecordSource source{[&](size_t record, int64_t begin, int64_t end, uint8_t* to) {
                              CHECK(begin == filled[record]);  // each byte once, in turn
                              filled[record] = end;
                              wanted.push_back({record, begin, end, to});
                              return base::Status::ok();
                            },
                            [&] {
                              for (auto each = wanted.rbegin(); each != wanted.rend(); ++each) {
                                std::memcpy(each->to, records.bytes[each->record].data() + each->begin,
                                            static_cast<size_t>(each->end - each->begin));
                              }
                              wanted.clear();
                              return base::Status::ok();
                            },
                            slots_a_run};
  const auto job = test::value_of(SaveJob::start(options));
  EXPECT_OK(job->append_filled(to_fill, source));
  return test::value_of(job->finish());
}

TEST_CASE("filled records: files have the bytes that they have if records are appended one by one") {
  Random random(20);
  for (int round = 0; round < test::rounds(16); ++round) {
    CAPTURE(round);
    const Records records = draw_records(&random);
    const bool is_plain = round % 2 == 0;
    const bool is_in_memory = round % 3 == 1;  // slots are filled ahead, and all else is filled in its place
    CAPTURE(is_in_memory);
    const TempDir one, other;
    const auto holder = test::registered_holder();
    holder->most_bytes = int64_t{1} << 30;
    const format::WriteResult wanted = write_in_turn(options_for(one, is_plain, &random), records);
    SaveOptions options = options_for(other, is_plain, &random);
    if (is_in_memory) options.directory = test::kHeldUrl;
    options.expected_bytes = is_in_memory ? 64 << 20 : 0;
    const format::WriteResult got = write_filled(options, records, 1 + round / 2 % 2);
    REQUIRE(got.records.size() == wanted.records.size());
    for (size_t r = 0; r < got.records.size(); ++r) {
      CHECK(got.records[r].fqn == wanted.records[r].fqn);
      CHECK(got.records[r].box == wanted.records[r].box);
      const format::Record &a = got.records[r].record, &b = wanted.records[r].record;
      CHECK(std::tuple(a.kind, a.stored_dtype, a.offset, a.bytes, a.data_offset, a.data_bytes) ==
            std::tuple(b.kind, b.stored_dtype, b.offset, b.bytes, b.data_offset, b.data_bytes));
    }
    REQUIRE(got.files.size() == 1);
    std::string a = test::read_all(one / wanted.files[0].name), b;
    b = is_in_memory ? test::value_of(io::read_file(options.directory, got.files[0].name))
                     : test::read_all(other / got.files[0].name);
    REQUIRE(a.size() == b.size());
    if (!is_plain) {
      // The random id of a file is in its header, and so in the CRC of its first block, and in its trailer.
      const format::Record& last = got.records.back().record;
      const auto table = static_cast<size_t>(last.offset + last.bytes);
      for (std::string* file : {&a, &b}) {
        file->resize(file->size() - format::kDataTrailerBytes);
        file->erase(table, sizeof(uint32_t));
        file->erase(0, format::kHeaderBytes);
      }
    }
    CHECK((a == b));
  }
}

TEST_CASE("filled records: failures of the source end the job") {
  const TempDir dir;
  Random random(21);
  Records records;
  for (int i = 0; i < 3; ++i) records.add(RecordKind::kBytes, staging::kSlotBytes, &random);
  std::vector<RecordToFill> to_fill;
  for (size_t r = 0; r < 3; ++r) {
    to_fill.push_back({&records.fqns[r], &records.boxes[r], RecordKind::kBytes, tensor::DType::kNone,
                       static_cast<int64_t>(records.bytes[r].size())});
  }
  const auto broken = [] { return base::Status::make(base::Code::kCorrupt, "broken"); };
  const auto fine = [] { return base::Status::ok(); };
  int num_runs = 0;
  for (const RecordSource& source :
       {RecordSource{[&](auto&&...) { return broken(); }, fine},
        RecordSource{[&](auto&&...) { return fine(); }, [&] { return ++num_runs == 2 ? broken() : fine(); }}}) {
    const auto job = test::value_of(SaveJob::start(options_for(dir, false, &random)));
    EXPECT_FAILURE(kCorrupt, "broken", job->append_filled(to_fill, source));
    job->cancel();
  }
  CHECK(num_runs == 2);
}

}  // namespace
}  // namespace bytecheckpoint::engine
