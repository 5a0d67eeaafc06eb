// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/open_torch_file.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "csrc/engine/open/model_files.h"
#include "csrc/engine/open/rank_files.h"
#include "csrc/engine/open/torch_files.h"
#include "csrc/io/directory.h"
#include "csrc/io/object_store.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr ModelNames kTorchNames{"file of torch.save", "pytorch_model",     ".bin",
                                 ".bin.index.json",    "pytorch_model.bin", "pytorch_model.bin.index.json"};
constexpr std::string_view kTorchSuffixes[] = {".pt", ".pth", ".bin", ".ckpt"};

bool has_suffix(const std::string& path) {
  return std::any_of(std::begin(kTorchSuffixes), std::end(kTorchSuffixes), [&](std::string_view suffix) {
    return path.size() > suffix.size() && path.compare(path.size() - suffix.size(), suffix.size(), suffix) == 0;
  });
}

base::Result<ModelFiles> find_torch_files(const std::string& path) {
  if (io::is_url(path)) return has_suffix(path) ? find_model_file(path) : find_model_files(path, kTorchNames);
  BCP_ASSIGN_OR_RETURN(const bool is_file, io::leads_to_file(path));
  const std::string_view index = kTorchNames.index_suffix;
  const bool is_index =
      path.size() > index.size() && path.compare(path.size() - index.size(), index.size(), index) == 0;
  return is_file && !is_index ? find_model_file(path) : find_model_files(path, kTorchNames);
}

}  // namespace

base::Result<format::Manifest> open_torch_file(const std::string& path) {
  base::Result<ModelFiles> found = find_torch_files(path);
  const bool is_of_ranks = !found.is_ok() && found.status().code() == Code::kNotFound;
  if (is_of_ranks) {
    base::Result<ModelFiles> of_ranks = find_rank_files(path);
    if (of_ranks.is_ok() || of_ranks.status().code() != Code::kNotFound) found = std::move(of_ranks);
  }
  BCP_ASSIGN_OR_RETURN(const ModelFiles files, std::move(found));
  BCP_ASSIGN_OR_RETURN(format::Manifest manifest, read_torch_files(files));
  // Ranks have the same names, and files of a model have flat ones.
  if (files.stored.size() > 1 && !is_of_ranks) manifest.planner_data = {};
  manifest.foreign->format = "torch";
  if (files.directory != path) manifest.foreign->directory = files.directory;
  if (is_of_ranks) BCP_RETURN_IF_ERROR(join_ranks(files, &manifest));
  BCP_RETURN_IF_ERROR(join_items(files, &manifest));
  return manifest;
}

}  // namespace bytecheckpoint::engine
