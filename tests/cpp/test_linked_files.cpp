// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/save/linked_files.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "csrc/engine/open/check_files.h"
#include "csrc/engine/save/save_job.h"
#include "csrc/io/directory.h"
#include "tests/cpp/saved_tensors.h"

namespace bytecheckpoint::engine {
namespace {

constexpr char kLibrary[] = "libxxhash.so.0";

/// What one save of a run did.
struct Step {
  std::string directory;
  std::shared_ptr<const LastSave> saved;
  SaveStats stats;
  std::string refused;
  std::vector<std::string> names;
  format::Manifest manifest;
};

/// Saves all tensors to a step of the run, commits, and compares what is there.
Step save_step(const TempDir& run, int number, std::vector<Saved>* tensors, std::shared_ptr<const LastSave> last,
               int most_links = 19) {
  REQUIRE(base::load_content_hash(kLibrary).is_ok());
  const std::string directory = run.path() + "/step-" + std::to_string(number);
  auto commit = test::value_of(Commit::begin(test::commit_options(directory, static_cast<uint8_t>(number))));
  SaveOptions options = test::save_options(directory);
  options.has_hashes = true;
  options.last = std::move(last);
  options.link_rule.most_links = most_links;
  auto job = test::value_of(SaveJob::start(std::move(options)));
  std::vector<SaveItem> items;
  std::vector<TensorToWrite> to_write;
  for (Saved& tensor : *tensors) items.push_back(tensor.item());
  for (const SaveItem& item : items) to_write.push_back({&item.fqn, &item.box, item.view});
  EXPECT_OK(job->append_all(to_write));
  items.push_back(test::bytes_item("of step " + std::to_string(number)));
  EXPECT_OK(job->append_bytes("content", items.back().bytes));
  const format::WriteResult result = test::value_of(job->finish());
  Step step{directory,         std::make_shared<LastSave>(job->take_saved()),
            job->stats(),      job->not_linked_because().message(),
            job->file_names(), {}};
  step.manifest =
      test::value_of(assemble_manifest(test::planned(items, test::save_id_of(static_cast<uint8_t>(number))), {result}));
  EXPECT_OK(commit->check_files(step.manifest.files));
  EXPECT_OK(commit->commit(format::encode_metadata_file(step.manifest), step.manifest.files, step.manifest.save_id));
  step.manifest = test::value_of(open_checkpoint(directory, {{}, /*check_pickle=*/true}));
  LoadJob load(load_options(directory), step.manifest);
  std::vector<std::string> loaded(tensors->size());
  for (size_t t = 0; t < tensors->size(); ++t) {
    add(&load, step.manifest, (*tensors)[t].fqn, tensor::whole((*tensors)[t].sizes), &loaded[t]);
  }
  EXPECT_OK(load.run(kNever));
  for (size_t t = 0; t < tensors->size(); ++t) {
    CHECK(loaded[t] == (*tensors)[t].expected(tensor::whole((*tensors)[t].sizes)));
  }
  return step;
}

nlink_t num_names(const std::string& path) {
  struct stat status{};
  REQUIRE(::stat(path.c_str(), &status) == 0);
  return status.st_nlink;
}

/// The files of a step, and how many names each has.
std::map<std::string, nlink_t> names_of(const Step& step) {
  std::map<std::string, nlink_t> names;
  for (const format::FileEntry& file : step.manifest.files) {
    names[file.name] = num_names(io::join(step.directory, file.name));
  }
  return names;
}

void change(std::vector<Saved>* tensors, const std::string& fqn) {
  for (Saved& tensor : *tensors) {
    if (tensor.fqn == fqn) tensor.memory.back() ^= 1;
  }
}

TEST_CASE("linked_files: what has not changed is linked, and what has is written") {
  const TempDir run(each_root());
  std::vector<Saved> tensors = sample_tensors();
  const Step first = save_step(run, 1, &tensors, nullptr);
  CHECK(first.stats.bytes_linked == 0);
  change(&tensors, "scalar");
  const Step second = save_step(run, 2, &tensors, first.saved);
  CHECK(second.refused == "");
  CHECK(second.stats.bytes_linked == first.stats.bytes_written);
  CHECK(second.stats.bytes_written < 10000);
  CHECK(second.names.size() == 1);  // what it has made: the link has the name of the first save
  // Only what is linked was read, and samples: the last byte of a large tensor is in no sample.
  CHECK(second.stats.bytes_compared < first.stats.bytes_written);
  change(&tensors, "of_several_slots");
  change(&tensors, "scalar");
  const Step third = save_step(run, 3, &tensors, second.saved);
  // Too little of the first file is in use: what is left of it gets a file of its own, which the next save links.
  CHECK(third.stats.bytes_linked == 0);
  CHECK(third.manifest.files.size() == 2);
  change(&tensors, "scalar");
  const Step fourth = save_step(run, 4, &tensors, third.saved);
  CHECK(fourth.stats.bytes_linked > 0);
  CHECK(fourth.stats.bytes_written < 10000);
  CHECK(fourth.stats.num_records == third.stats.num_records);
}

TEST_CASE("linked_files: each step stays whole when others are removed, in any order") {
  const TempDir run;
  std::vector<Saved> tensors = sample_tensors();
  std::vector<Step> steps{save_step(run, 1, &tensors, nullptr)};
  for (int number = 2; number < 5; ++number) {
    change(&tensors, "scalar");
    steps.push_back(save_step(run, number, &tensors, steps.back().saved));
  }
  CHECK(names_of(steps[3]).at(steps[0].manifest.files[0].name) == 4);
  for (const size_t gone : {1, 0, 3}) {
    std::filesystem::remove_all(steps[gone].directory);
    EXPECT_OK(check_files(steps[2].directory, steps[2].manifest.files));
  }
  for (const auto& [name, num] : names_of(steps[2])) CHECK(num == 1);
}

TEST_CASE("linked_files: a file is written anew after so many links") {
  const TempDir run;
  std::vector<Saved> tensors = sample_tensors();
  std::shared_ptr<const LastSave> last;
  std::vector<bool> is_linked;
  for (int number = 1; number < 8; ++number) {
    const Step step = save_step(run, number, &tensors, last, /*most_links=*/2);
    is_linked.push_back(step.stats.bytes_linked > 0);
    last = step.saved;
  }
  CHECK(is_linked == std::vector<bool>{false, true, true, false, true, true, false});
}

TEST_CASE("linked_files: a file that is not as it was left is written anew, and so is one that is gone") {
  const TempDir run;
  std::vector<Saved> tensors = sample_tensors();
  const Step first = save_step(run, 1, &tensors, nullptr);
  const std::string path = io::join(first.directory, first.manifest.files[0].name);
  SUBCASE("cut") {
    REQUIRE(::truncate(path.c_str(), first.manifest.files[0].bytes - 1) == 0);
    CHECK(test::contains(save_step(run, 2, &tensors, first.saved).refused, "the file must have"));
  }
  SUBCASE("another trailer") {
    test::flip_bit(path, first.manifest.files[0].bytes - 60);
    CHECK(test::contains(save_step(run, 2, &tensors, first.saved).refused, path.substr(path.rfind('/'))));
  }
  SUBCASE("gone") {
    std::filesystem::remove_all(first.directory);
    CHECK(test::contains(save_step(run, 2, &tensors, first.saved).refused, "link"));
  }
  SUBCASE("a symbolic link") {
    REQUIRE(std::rename(path.c_str(), (path + ".moved").c_str()) == 0);
    REQUIRE(::symlink((path + ".moved").c_str(), path.c_str()) == 0);
    CHECK(save_step(run, 2, &tensors, first.saved).refused != "");
  }
  // If it was linked, the commit has swept it.
  CHECK(!std::filesystem::exists(run.path() + "/step-2/" + first.manifest.files[0].name));
}

TEST_CASE("linked_files: over the same step everything is written, and the old files stay until it is committed") {
  const TempDir run;
  std::vector<Saved> tensors = sample_tensors();
  const Step first = save_step(run, 1, &tensors, nullptr);
  const Step again = save_step(run, 1, &tensors, first.saved);
  CHECK(again.stats.bytes_linked == 0);
  // By another path to the same folder, too.
  LastSave elsewhere = *again.saved;
  elsewhere.directory = run.path() + "/./step-1";
  const Step third = save_step(run, 1, &tensors, std::make_shared<LastSave>(elsewhere));
  CHECK(third.stats.bytes_linked == 0);
  for (const std::string& name : third.names) CHECK(name != again.manifest.files[0].name);
}

TEST_CASE("linked_files: a save of another process goes on from what is stored") {
  const TempDir run;
  std::vector<Saved> tensors = sample_tensors();
  const Step first = save_step(run, 1, &tensors, nullptr);
  std::unordered_map<std::string, StoredHashes> stored;
  for (const auto& [file, hashes] : first.saved->hashes_by_file()) stored[file->entry.name] = {3, hashes};
  const LastSave read = last_save_of(first.manifest, first.directory, /*rank=*/0, stored);
  REQUIRE(read.files.size() == 1);
  CHECK(read.files[0].num_links == 3);
  for (const Saved& tensor : tensors) {
    const SavedRecord* const kept = first.saved->find(tensor.fqn, tensor::whole(tensor.sizes), tensor.dtype);
    const SavedRecord* const found = read.find(tensor.fqn, tensor::whole(tensor.sizes), tensor.dtype);
    REQUIRE(kept != nullptr);
    REQUIRE(found != nullptr);
    CHECK(found->hash == kept->hash);
  }
  CHECK(last_save_of(first.manifest, first.directory, /*rank=*/1, stored).files.empty());
  change(&tensors, "scalar");
  const Step second = save_step(run, 2, &tensors, std::make_shared<LastSave>(read));
  CHECK(second.stats.bytes_linked == first.stats.bytes_written);
  CHECK(names_of(second).size() == 2);
  stored.begin()->second.hashes.pop_back();  // what does not fit is of no use
  CHECK(last_save_of(first.manifest, first.directory, /*rank=*/0, stored).files.empty());
}

TEST_CASE("linked_files: another shape, dtype or part of a tensor is another record") {
  const TempDir run;
  std::vector<Saved> tensors = sample_tensors();
  const Step first = save_step(run, 1, &tensors, nullptr);
  for (Saved& tensor : tensors) {
    if (tensor.fqn != "of_several_slots") continue;
    SUBCASE("dtype") {
      tensor.dtype = DType::kInt8;
    }
    SUBCASE("shape") {
      tensor.sizes = {1, tensor.sizes[0]};
      tensor.strides_bytes = contiguous_strides(tensor.sizes, 1);
    }
    SUBCASE("box") {
      tensor.sizes[0] -= 1;
    }
  }
  const Step second = save_step(run, 2, &tensors, first.saved);
  CHECK(second.stats.bytes_written > (18 << 20));
}

}  // namespace
}  // namespace bytecheckpoint::engine
