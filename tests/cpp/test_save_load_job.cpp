// SPDX-License-Identifier: Apache-2.0
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/crc32.h"
#include "tests/cpp/file_size_limit.h"
#include "tests/cpp/saved_tensors.h"

namespace bytecheckpoint::engine {
namespace {

base::Status load_all(const TempDir& dir, const format::Manifest& manifest, const std::vector<Saved>& tensors) {
  LoadJob job(load_options(dir.path()), manifest);
  std::vector<std::string> loaded(tensors.size());
  for (size_t t = 0; t < tensors.size(); ++t) {
    add(&job, manifest, tensors[t].fqn, tensor::whole(tensors[t].sizes), &loaded[t]);
  }
  return job.run(kNever).status();
}

TEST_CASE("save_load_job: tensors of every layout and bytes come back, whatever the options") {
  for (const auto& [direct, one_file, save_threads, load_threads] :
       {std::tuple{true, false, 1, 1}, {true, false, 2, 2}, {false, true, 2, 1}, {true, true, 1, 2}}) {
    CAPTURE(direct);
    CAPTURE(one_file);
    const TempDir dir(each_root());
    std::vector<Saved> tensors = sample_tensors();
    SaveOptions options = test::save_options(dir.path());
    options.direct_io = direct;
    options.one_file_a_record = one_file;
    options.num_io_threads = save_threads;
    options.expected_bytes = 1 << 20;
    const format::Manifest manifest = save(dir, &tensors, options);
    CHECK(manifest.files.size() == (one_file ? tensors.size() + 1 : 1));

    LoadOptions how = load_options(dir.path(), direct);
    how.num_io_threads = load_threads;
    LoadJob job(how, manifest);
    std::vector<std::string> loaded(tensors.size());
    for (size_t t = 0; t < tensors.size(); ++t) {
      add(&job, manifest, tensors[t].fqn, tensor::whole(tensors[t].sizes), &loaded[t]);
    }
    std::string content(300001, '\0');
    job.destinations().add_bytes(manifest.find("content")->chunks[0].record,
                                 reinterpret_cast<uint8_t*>(content.data()));
    const LoadStats stats = test::value_of(job.run(kNever));
    CHECK((content == test::patterned(300001)));
    for (size_t t = 0; t < tensors.size(); ++t) {
      CAPTURE(tensors[t].fqn);
      CHECK((loaded[t] == tensors[t].expected(tensor::whole(tensors[t].sizes))));
    }
    CHECK(stats.num_boxes == static_cast<int64_t>(tensors.size()) + 1);
    CHECK(stats.bytes_read >= stats.bytes_wanted);
    CHECK(stats.bytes_read < stats.bytes_wanted + (manifest.files.size() + 1) * 2 * format::kBlockBytes);
  }
}

TEST_CASE("save_load_job: data is aligned in the file, and files are what the manifest says") {
  const TempDir dir;
  std::vector<Saved> tensors = sample_tensors();
  const format::Manifest manifest = save(dir, &tensors, test::save_options(dir.path()));
  for (const format::Item& item : manifest.items) {
    const format::Record& record = item.chunks[0].record;
    if (!item.is_tensor) continue;
    CHECK(record.data_offset % (record.data_bytes >= 1 << 20 ? 4096 : 64) == 0);
    CHECK(record.offset % 64 == 0);
  }
  struct stat info{};
  REQUIRE(::stat((dir / manifest.files[0].name).c_str(), &info) == 0);
  CHECK(info.st_size == manifest.files[0].bytes);
  const std::string head = test::read_all(dir / manifest.files[0].name).substr(0, format::kHeaderBytes);
  CHECK(test::value_of(format::decode_header(head)).file_id == manifest.files[0].id.file_id);
}

TEST_CASE("save_load_job: any box goes into memory of any layout, and beside it nothing changes") {
  const TempDir dir(each_root());
  std::vector<Saved> tensors = sample_tensors();
  const format::Manifest manifest = save(dir, &tensors, test::save_options(dir.path()));
  test::Random random(16);
  for (int round = 0; round < 30; ++round) {
    LoadJob job(load_options(dir.path()), manifest);
    std::vector<test::RandomMemory> memories;
    std::vector<std::vector<uint8_t>> expected;
    memories.reserve(8);
    for (int wanted = 0; wanted < 8; ++wanted) {
      const Saved& saved = tensors[static_cast<size_t>(test::draw(&random, 0, 7))];
      Box box = test::draw_box(&random, saved.sizes);
      for (int64_t& size : box.sizes) size = std::min<int64_t>(size, 200);
      const int64_t itemsize = tensor::find_dtype(saved.dtype)->itemsize_bytes;
      test::RandomMemory& memory = memories.emplace_back(test::draw_memory(&random, box.sizes, itemsize, false));
      std::vector<uint8_t> after = memory.bytes;
      const std::string content = saved.expected(box);
      size_t at = 0;
      test::for_each_index(box.sizes, [&](const Dims& index) {
        std::memcpy(after.data() + memory.first + test::dot(index, memory.strides_bytes), content.data() + at,
                    static_cast<size_t>(itemsize));
        at += static_cast<size_t>(itemsize);
      });
      expected.push_back(std::move(after));
      EXPECT_OK(job.destinations().add_tensor(saved.fqn, manifest.find(saved.fqn)->chunks[0],
                                              place_of(manifest.find(saved.fqn)->chunks[0]), box,
                                              {memory.data(), saved.dtype, box.sizes, memory.strides_bytes}));
    }
    EXPECT_OK(job.run(kNever));
    for (size_t w = 0; w < memories.size(); ++w) REQUIRE((memories[w].bytes == expected[w]));
  }
}

TEST_CASE("save_load_job: nothing saved is no file, nothing wanted is nothing read") {
  const TempDir dir(each_root());
  const format::WriteResult result = test::value_of(test::write_items({}, test::save_options(dir.path())));
  CHECK(result.files.empty());
  CHECK(dir.names().empty());
  const format::Manifest manifest;
  LoadJob job(load_options(dir.path()), manifest);
  CHECK(test::value_of(job.run(kNever)).bytes_read == 0);
}

TEST_CASE("save_load_job: a changed byte is found, named by file and block, and not delivered") {
  const TempDir dir(each_root());
  std::vector<Saved> tensors = {sample_tensors()[0], sample_tensors()[3]};
  const format::Manifest manifest = save(dir, &tensors, test::save_options(dir.path()));
  const std::string path = dir / manifest.files[0].name;
  const format::Record& record = manifest.find("above_1_mib")->chunks[0].record;
  for (const int64_t at : {record.data_offset, record.data_offset + record.data_bytes - 1, record.offset + 3}) {
    test::flip_bit(path, at);
    const int64_t block = base::align_down(at, format::kBlockBytes);
    const base::Status status = load_all(dir, manifest, tensors);
    CHECK(test::contains(status.message(), path));
    CHECK(test::contains(status.message(), base::text("offset=", block, ",")));
    CHECK((status.code() == base::Code::kCorrupt));
    CHECK(status.path() == path);
    test::flip_bit(path, at);
  }
  EXPECT_OK(load_all(dir, manifest, tensors));

  test::flip_bit(path, record.data_offset + record.data_bytes - 1);
  LoadJob job(load_options(dir.path()), manifest);
  std::string loaded;
  add(&job, manifest, "contiguous", tensor::whole(tensors[0].sizes), &loaded);
  EXPECT_OK(job.run(kNever));  // the changed byte is in another block
  LoadOptions unverified = load_options(dir.path());
  unverified.verify = false;
  LoadJob trusting(unverified, manifest);
  add(&trusting, manifest, "above_1_mib", tensor::whole(tensors[1].sizes), &loaded);
  EXPECT_OK(trusting.run(kNever));
}

TEST_CASE("save_load_job: a file that is cut, swapped, missing, or has another table is found before its data") {
  const TempDir dir, other;
  std::vector<Saved> tensors = {sample_tensors()[0]};
  const format::Manifest manifest = save(dir, &tensors, test::save_options(dir.path()));
  const format::Manifest stranger = save(other, &tensors, test::save_options(other.path()), 2);
  const std::string path = dir / manifest.files[0].name;
  const std::string good = test::read_all(path);
  const auto loaded_from = [&](const std::string& content) {
    test::write_all(path, content);
    return load_all(dir, manifest, tensors);
  };
  EXPECT_OK(loaded_from(good));
  EXPECT_FAILURE(kCorrupt, path, loaded_from(good.substr(0, good.size() - 1)));
  EXPECT_FAILURE(kCorrupt, path, loaded_from(good + "x"));
  EXPECT_FAILURE(kCorrupt, path, loaded_from(""));
  const std::string swapped = test::read_all(other / stranger.files[0].name);
  REQUIRE(swapped.size() == good.size());
  EXPECT_FAILURE(kCorrupt, base::to_hex(stranger.files[0].id.file_id), loaded_from(swapped));
  std::string table = good;
  table[good.size() - format::kDataTrailerBytes - 1] ^= 1;
  EXPECT_FAILURE(kCorrupt, "block table", loaded_from(table));
  REQUIRE(::unlink(path.c_str()) == 0);
  const base::Status missing = load_all(dir, manifest, tensors);
  EXPECT_FAILURE(kCorrupt, "missing", missing);
}

TEST_CASE(
    "save_load_job: a file of the same id with other content, whole in itself, is not the one that was committed") {
  const TempDir dir;
  std::vector<Saved> tensors = {sample_tensors()[0]};
  const format::Manifest manifest = save(dir, &tensors, test::save_options(dir.path()));
  const std::string path = dir / manifest.files[0].name;
  std::string file = test::read_all(path);
  const size_t tail = file.size() - format::kDataTrailerBytes;
  format::DataTrailer trailer =
      test::value_of(format::decode_data_trailer(file.substr(tail), static_cast<int64_t>(file.size())));
  file[static_cast<size_t>(manifest.find("contiguous")->chunks[0].record.data_offset)] ^= 1;
  const auto table_begin = static_cast<size_t>(trailer.end_of_records);
  std::vector<uint32_t> crcs = format::decode_block_table(file.substr(table_begin, tail - table_begin));
  crcs[0] = base::crc32(0, file.data(), std::min<size_t>(table_begin, format::kBlockBytes));
  const std::string table = format::encode_block_table(crcs);
  trailer.table_crc = base::crc32(0, table.data(), table.size());
  test::write_all(path, file.substr(0, table_begin) + table + format::encode_data_trailer(&trailer));
  EXPECT_FAILURE(kCorrupt, path, load_all(dir, manifest, tensors));
}

TEST_CASE("save_load_job: a newer commit during a load is told from damage") {
  const TempDir dir(each_root());
  std::vector<Saved> tensors = {sample_tensors()[0]};
  const format::Manifest old = save(dir, &tensors, test::save_options(dir.path()), 1);
  const format::Manifest current = save(dir, &tensors, test::save_options(dir.path()), 2);
  EXPECT_FAILURE(kChanged, "newer commit", load_all(dir, old, tensors));
  EXPECT_OK(load_all(dir, current, tensors));
}

TEST_CASE("save_load_job: a checkpoint that is removed during a load is not called damaged") {
  const TempDir dir(each_root());
  std::vector<Saved> tensors = {sample_tensors()[0]};
  const format::Manifest manifest = save(dir, &tensors, test::save_options(dir.path()));
  REQUIRE(::unlink((dir / std::string(kMetadataName)).c_str()) == 0);  // as a prune does, the mark first
  EXPECT_OK(load_all(dir, manifest, tensors));
  REQUIRE(::unlink((dir / manifest.files[0].name).c_str()) == 0);
  const base::Status removed = load_all(dir, manifest, tensors);
  EXPECT_FAILURE(kNotFound, "removed while it was read", removed);
  CHECK(removed.sys_errno() == ENOENT);
}

TEST_CASE("save_load_job: what does not fit the stored chunk is refused") {
  const TempDir dir;
  std::vector<Saved> tensors = {sample_tensors()[0]};
  const format::Manifest manifest = save(dir, &tensors, test::save_options(dir.path()));
  LoadJob job(load_options(dir.path()), manifest);
  const format::Chunk& chunk = manifest.find("contiguous")->chunks[0];
  uint8_t memory[64] = {};
  EXPECT_FAILURE(kInvalidArgument, "'contiguous'",
                 job.destinations().add_tensor("contiguous", chunk, place_of(chunk), {{13, 0, 0}, {1, 1, 1}},
                                               {memory, DType::kFloat32, {1, 1, 1}, {4, 4, 4}}));
  EXPECT_CODE(kInvalidArgument,
              job.destinations().add_tensor("contiguous", chunk, place_of(chunk), {{0, 0, 0}, {1, 1, 2}},
                                            {memory, DType::kFloat32, {1, 1, 1}, {4, 4, 4}}));
  EXPECT_CODE(kInvalidArgument,
              job.destinations().add_tensor("contiguous", chunk, place_of(chunk), {{0, 0, 0}, {1, 1, 1}},
                                            {memory, DType::kInt32, {1, 1, 1}, {4, 4, 4}}));
  const format::Chunk& bytes = manifest.find("content")->chunks[0];
  EXPECT_CODE(kInvalidArgument,
              job.destinations().add_tensor("content", bytes, place_of(bytes), {}, {memory, DType::kFloat32, {}, {}}));
}

TEST_CASE("save_load_job: both tell how far they are, up to the end") {
  const TempDir dir(each_root());
  std::vector<Saved> tensors = sample_tensors();
  const format::Manifest manifest = save(dir, &tensors, test::save_options(dir.path()));
  std::vector<int64_t> told;
  LoadOptions options = load_options(dir.path());
  options.progress = [&](int64_t bytes) { told.push_back(bytes); };
  LoadJob job(options, manifest);
  std::string loaded;
  add(&job, manifest, "of_several_slots", tensor::whole(tensors[4].sizes), &loaded);
  const LoadStats stats = test::value_of(job.run(kNever));
  CHECK(told.size() > 1);
  CHECK(std::is_sorted(told.begin(), told.end()));
  CHECK(told.back() == stats.bytes_wanted);
  LoadJob nothing(options, manifest);
  told.clear();
  EXPECT_OK(nothing.run(kNever));
  CHECK(told.empty());

  const auto saving = test::value_of(SaveJob::start(test::save_options(dir.path())));
  CHECK(saving->bytes_done() == 0);
  EXPECT_OK(saving->append_bytes("content", test::patterned(300001)));
  EXPECT_OK(saving->finish().status());
  CHECK(saving->bytes_done() >= saving->stats().bytes_written);
}

TEST_CASE("save_load_job: a load that is interrupted ends") {
  const TempDir dir(each_root());
  std::vector<Saved> tensors = sample_tensors();
  const format::Manifest manifest = save(dir, &tensors, test::save_options(dir.path()));
  LoadJob job(load_options(dir.path()), manifest);
  std::string loaded;
  add(&job, manifest, "of_several_slots", tensor::whole(tensors[4].sizes), &loaded);
  EXPECT_CODE(kCancelled, job.run([] { return true; }));
}

TEST_CASE("save_load_job: a save that fails says why, ends, and names the files it made") {
  const TempDir dir;
  EXPECT_CODE(kStorage, test::write_items({test::bytes_item("x")}, test::save_options(dir / "absent")));
  const auto job = test::value_of(SaveJob::start(test::save_options(dir.path())));
  uint8_t memory[4] = {};
  EXPECT_CODE(kInvalidArgument, job->append_tensor("w", tensor::whole({1}), {memory, DType::kNone, {1}, {1}}));
  CHECK(job->file_names() == dir.names());
}

TEST_CASE("save_load_job: a file ends before a record that would make it too long") {
  const TempDir dir;
  std::vector<Saved> tensors = sample_tensors();  // one of 18 MiB, and less than 3 MiB of others
  SaveOptions options = test::save_options(dir.path());
  options.max_file_bytes = 20 << 20;
  const format::Manifest manifest = save(dir, &tensors, options);
  CHECK(manifest.files.size() == 2);
  for (const format::FileEntry& file : manifest.files) CHECK(file.bytes <= options.max_file_bytes);
  EXPECT_OK(load_all(dir, manifest, tensors));

  options.max_file_bytes = 18 << 20;
  const TempDir other;
  options.directory = other.path();
  std::vector<SaveItem> items;
  for (Saved& tensor : tensors) items.push_back(tensor.item());
  EXPECT_FAILURE(kUnsupported, "shard the tensor", test::write_items(items, options));
}

TEST_CASE("save_load_job: many tensors are appended with a niceness that the calling thread does not take on") {
  const TempDir dir;
  SaveOptions options = test::save_options(dir.path());
  options.niceness = 3;
  const auto job = test::value_of(SaveJob::start(std::move(options)));
  uint8_t memory[4] = {1, 2, 3, 4};
  const std::string first = "first", second = "second";
  const Box box = tensor::whole({4});
  const int before = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()));
  EXPECT_OK(job->append_tensors({{&first, &box, {memory, DType::kUInt8, {4}, {1}}}}));
  CHECK(job->stats().num_records == 1);
  EXPECT_FAILURE(kInvalidArgument, "while saving 'second'",
                 job->append_tensors({{&first, &box, {memory, DType::kUInt8, {4}, {1}}},
                                      {&second, &box, {memory, DType::kNone, {4}, {1}}}}));
  CHECK(::getpriority(PRIO_PROCESS, static_cast<id_t>(::gettid())) == before);
}

TEST_CASE("save_load_job: a disk that takes no more ends the save with its reason, whatever is still to come") {
  const TempDir dir;
  const test::FileSizeLimit limit(10 << 20);
  std::string memory(60 << 20, 'm');
  const Dims sizes = {60 << 20};
  const std::vector<SaveItem> items = {
      {"w", sizes, tensor::whole(sizes), {reinterpret_cast<uint8_t*>(memory.data()), DType::kUInt8, sizes, {1}}, {}},
      test::bytes_item("x")};
  const base::Status status = test::write_items(items, test::save_options(dir.path())).status();
  EXPECT_FAILURE(kStorage, dir.path(), status);
  CHECK(status.sys_errno() == EFBIG);
}

TEST_CASE("save_load_job: a record that reaches behind the records of its file is damage, not an untouched buffer") {
  const TempDir dir(each_root());
  test::save_checkpoint(dir.path(), 1, std::string(600000, 'b'));
  const format::Manifest manifest = test::value_of(open_checkpoint(dir.path()));
  const int64_t file_bytes = manifest.files[0].bytes;
  for (const int64_t offset : {file_bytes - 60, file_bytes - 100}) {
    format::Record record = manifest.items[0].chunks[0].record;
    record.offset = offset;
    record.bytes = 50;
    std::string out(50, 'E');
    LoadJob job(load_options(dir.path()), manifest);
    job.destinations().add_bytes(record, reinterpret_cast<uint8_t*>(out.data()));
    EXPECT_CODE(kCorrupt, job.run(kNever));
    CHECK(out == std::string(50, 'E'));
  }
}

}  // namespace
}  // namespace bytecheckpoint::engine
