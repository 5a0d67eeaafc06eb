// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/engine/assemble.h"
#include "csrc/engine/commit.h"
#include "csrc/engine/save_job.h"
#include "csrc/format/metadata_file.h"
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
  return options;
}

inline engine::CommitOptions commit_options(const std::string& directory, uint8_t save_number) {
  engine::CommitOptions options;
  options.directory = directory;
  options.save_id = save_id_of(save_number);
  return options;
}

/// What a coordinator would plan for `items`; chunks of one fqn are joined.
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

/// One rank's part: tensors first, then bytes.
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

/// A checkpoint of one item of bytes, between begin and commit.
struct PendingSave {
  std::unique_ptr<engine::Commit> commit;
  format::Manifest manifest;

  std::string file_name() const { return manifest.files.at(0).name; }
  base::Result<engine::CommitReport> finish() {
    return commit->commit(format::encode_metadata_file(manifest), manifest.files);
  }
};

inline SaveItem bytes_item(std::string content) {
  return {"content", {}, {}, {}, std::move(content)};
}

inline PendingSave begin_save(engine::CommitOptions options, const std::string& content) {
  PendingSave save;
  const base::Id id = options.save_id;
  const std::string directory = options.directory;
  save.commit = value_of(engine::Commit::begin(std::move(options)));
  const std::vector<SaveItem> items = {bytes_item(content)};
  const format::WriteResult result = value_of(write_items(items, save_options(directory)));
  save.manifest = value_of(engine::assemble_manifest(planned(items, id), {result}));
  EXPECT_OK(save.commit->check_files(save.manifest.files));
  return save;
}

/// A finished checkpoint; \returns the name of its data file.
inline std::string save_checkpoint(const std::string& directory, uint8_t save_number, const std::string& content) {
  PendingSave save = begin_save(commit_options(directory, save_number), content);
  EXPECT_OK(save.finish());
  return save.file_name();
}

}  // namespace bytecheckpoint::test
