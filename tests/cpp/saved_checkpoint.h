// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/engine/commit/assemble.h"
#include "csrc/engine/commit/commit.h"
#include "csrc/engine/save/save_job.h"
#include "csrc/format/manifest/metadata_file.h"
#include "tests/cpp/expect.h"

namespace bytecheckpoint::test {

/// One thing to save: a chunk of a tensor in memory, or bytes if `view` has no dtype.
struct SaveItem {
  std::string fqn;
  tensor::Dims global_sizes;
  tensor::Box box;
  tensor::StridedView view;
  std::string bytes;
};

inline base::Id save_id_of(uint8_t number) {
  base::Id id{};
  id.fill(0xC0);
  id[15] = number;
  return id;
}

inline engine::SaveOptions save_options(const std::string& directory) {
  engine::SaveOptions options;
  options.directory = directory;
  options.ring_bytes = 16 << 20;
  options.io_timeout_s = 60;  // tests run with the threads that a timeout needs
  return options;
}

inline engine::CommitOptions commit_options(const std::string& directory, uint8_t save_number) {
  engine::CommitOptions options;
  options.directory = directory;
  options.save_id = save_id_of(save_number);
  options.io_timeout_s = 60;
  return options;
}

/// The manifest that a coordinator would plan for `items`. Chunks of one fqn are joined.
inline format::Manifest planned(const std::vector<SaveItem>& items, const base::Id& save_id) {
  format::Manifest manifest;
  manifest.save_id = save_id;
  manifest.checkpoint_id = "/planned";
  for (const SaveItem& item : items) {
    format::Item* entry = nullptr;
    for (format::Item& known : manifest.items) {
      if (known.fqn == item.fqn) entry = &known;
    }
    if (entry == nullptr) {
      entry = &manifest.items.emplace_back();
      entry->fqn = item.fqn;
      entry->is_tensor = item.view.dtype != tensor::DType::kNone;
      entry->ordinal = static_cast<uint32_t>(manifest.items.size() - 1);
      entry->tensor.dtype = item.view.dtype;
      entry->tensor.sizes = item.global_sizes;
    }
    entry->chunks.push_back({item.box, {}});
  }
  return manifest;
}

/// Writes one rank's part: tensors first, then bytes.
inline base::Result<format::WriteResult> write_items(const std::vector<SaveItem>& items, engine::SaveOptions options) {
  BCP_ASSIGN_OR_RETURN(const auto job, engine::SaveJob::start(std::move(options)));
  for (const SaveItem& item : items) {
    if (item.view.dtype == tensor::DType::kNone) continue;
    BCP_RETURN_IF_ERROR(job->append_tensor(item.fqn, item.box, item.view));
  }
  for (const SaveItem& item : items) {
    if (item.view.dtype != tensor::DType::kNone) continue;
    BCP_RETURN_IF_ERROR(job->append_bytes(item.fqn, item.bytes));
  }
  return job->finish();
}

/// A checkpoint between begin and commit.
struct PendingSave {
  std::unique_ptr<engine::Commit> commit;
  format::Manifest manifest;

  std::string file_name() const { return manifest.files.at(0).name; }
  base::Result<engine::CommitReport> finish() {
    return commit->commit(format::encode_metadata_file(manifest), manifest.files, manifest.save_id);
  }
};

inline SaveItem bytes_item(std::string content) {
  return {"content", {}, {}, {}, std::move(content)};
}

/// \param of_ranks  The items of each rank, or of the one rank in a save without collectives.
inline PendingSave begin_save(engine::CommitOptions options, const std::vector<std::vector<SaveItem>>& of_ranks) {
  PendingSave save;
  const engine::CommitOptions asked = options;
  save.commit = value_of(engine::Commit::begin(std::move(options)));
  std::vector<SaveItem> all;
  std::vector<format::WriteResult> results;
  for (const std::vector<SaveItem>& items : of_ranks) {
    engine::SaveOptions writing = save_options(asked.directory);
    writing.rank = asked.scope.value_or(static_cast<uint32_t>(results.size()));
    writing.sync = asked.sync;
    results.push_back(value_of(write_items(items, std::move(writing))));
    all.insert(all.end(), items.begin(), items.end());
  }
  save.manifest = value_of(engine::assemble_manifest(planned(all, asked.save_id), results));
  EXPECT_OK(save.commit->check_files(save.manifest.files));
  return save;
}

/// Begins a save of one item of bytes.
inline PendingSave begin_save(engine::CommitOptions options, const std::string& content) {
  return begin_save(std::move(options), std::vector<std::vector<SaveItem>>{{bytes_item(content)}});
}

/// Saves a checkpoint. \returns the name of its data file.
inline std::string save_checkpoint(const std::string& directory, uint8_t save_number, const std::string& content) {
  PendingSave save = begin_save(commit_options(directory, save_number), content);
  EXPECT_OK(save.finish());
  return save.file_name();
}

}  // namespace bytecheckpoint::test
