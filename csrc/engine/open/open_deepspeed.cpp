// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/open_deepspeed.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/engine/open/model_files.h"
#include "csrc/engine/open/torch_files.h"
#include "csrc/engine/open/zero_reader.h"
#include "csrc/engine/open/zero_values.h"
#include "csrc/io/directory.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr std::string_view kWhatOfDeepSpeed = "step of DeepSpeed";
constexpr const char* kUniversalFolder = "zero";
constexpr const char* kUniversalOptimizer = "optimizer_state.pt";
constexpr int64_t kMostNameBytes = 256;

/// Reads the name of the step that `latest` names; "" if it names none.
base::Result<std::string> latest_in(const std::string& directory) {
  // Others have a link or a folder of this name.
  BCP_ASSIGN_OR_RETURN(const io::EntryType type, io::entry_type(io::join(directory, "latest")));
  if (type != io::EntryType::kRegular) return std::string();
  BCP_ASSIGN_OR_RETURN(io::File file, io::File::open(directory, "latest", /*direct=*/false));
  BCP_ASSIGN_OR_RETURN(const int64_t size, file.size());
  BCP_ASSIGN_OR_RETURN(std::string name, file.read(0, std::min(size, kMostNameBytes)));
  while (!name.empty() && (name.back() == '\n' || name.back() == ' ')) name.pop_back();
  const bool is_name = name.find('/') == std::string::npos && name != "." && name != "..";
  return is_name ? name : std::string();
}

/// Returns names by rank. \returns kCorrupt if one is missing before another.
base::Result<std::vector<std::string>> in_order(const std::map<int, std::string>& names, const std::string& path) {
  std::vector<std::string> found;
  for (const auto& [rank, name] : names) {
    if (rank != static_cast<int>(found.size())) {
      return Status::make(Code::kCorrupt,
                          text("open(", path, "): the file of rank ", found.size(), " is missing, beside ", name), path,
                          ENOENT);
    }
    found.push_back(name);
  }
  return found;
}

/// Finds the files of a universal checkpoint: `zero/PARAMETER/KEY.pt`, and `zero/optimizer_state.pt`. Files of other
/// names are of people and of file managers, and so is what a dot begins.
Status find_wholes(ZeroStep* step) {
  constexpr std::string_view kSuffix = ".pt";
  const std::string folder = io::join(step->directory, kUniversalFolder);
  BCP_ASSIGN_OR_RETURN(std::vector<std::string> parameters, names_to_search(folder, kWhatOfDeepSpeed));
  std::sort(parameters.begin(), parameters.end());
  for (const std::string& parameter : parameters) {
    if (parameter == kUniversalOptimizer) {
      step->optimizers.push_back(io::join(kUniversalFolder, parameter));
      continue;
    }
    BCP_ASSIGN_OR_RETURN(const io::EntryType type, io::entry_type(io::join(folder, parameter)));
    if (parameter[0] == '.' || type == io::EntryType::kRegular) continue;
    BCP_ASSIGN_OR_RETURN(std::vector<std::string> names,
                         names_to_search(io::join(folder, parameter), kWhatOfDeepSpeed));
    std::sort(names.begin(), names.end());
    for (const std::string& name : names) {
      const size_t stem = name.size() - std::min(name.size(), kSuffix.size());
      const bool is_value = stem > 0 && name[0] != '.' && name.substr(stem) == kSuffix;
      if (is_value) step->wholes.push_back({parameter, name.substr(0, stem)});
    }
  }
  return Status::ok();
}

/// \param is_run  Whether it may be the folder of a run.
base::Result<ZeroStep> find_step(const std::string& path, bool is_run) {
  BCP_ASSIGN_OR_RETURN(const std::vector<std::string> listed, names_to_search(path, kWhatOfDeepSpeed));
  std::map<int, std::string> models, optimizers;
  bool has_latest = false, has_folder = false;
  for (const std::string& name : listed) {
    has_latest |= name == "latest";
    has_folder |= name == kUniversalFolder;
    const std::optional<ZeroFile> file = parse_zero_file(name);
    if (is_of_layer_or_expert(name) || (file.has_value() && file->model_rank != 0)) {
      return Status::make(
          Code::kUnsupported,
          text("open(", path, "): ", name, " is of tensor or pipeline parallelism, or of experts, whose ",
               "parts are not joined: convert them by the library that trained"),
          path);
    }
    if (!file.has_value()) continue;
    const auto [other, is_first] = (file->is_of_optimizer ? optimizers : models).emplace(file->rank, name);
    if (is_first) continue;
    return Status::make(Code::kUnsupported,
                        text("open(", path, "): both ", other->second, " and ", name, " are of rank ", file->rank),
                        path);
  }
  if (models.empty() && optimizers.empty() && has_latest && is_run) {
    BCP_ASSIGN_OR_RETURN(const std::string name, latest_in(path));
    return name.empty() ? no_checkpoint(path, kWhatOfDeepSpeed) : find_step(io::join(path, name), /*is_run=*/false);
  }
  const bool is_universal = !models.empty() && optimizers.empty() && has_folder;
  if (models.empty() || (optimizers.empty() && !is_universal)) return no_checkpoint(path, kWhatOfDeepSpeed);
  ZeroStep step{path, {}, {}, {}, is_universal};
  BCP_ASSIGN_OR_RETURN(step.models, in_order(models, path));
  if (is_universal) BCP_RETURN_IF_ERROR(find_wholes(&step));
  if (!is_universal) {
    BCP_ASSIGN_OR_RETURN(step.optimizers, in_order(optimizers, path));
  }
  return step;
}

}  // namespace

base::Result<format::Manifest> open_deepspeed(const std::string& path) {
  BCP_ASSIGN_OR_RETURN(const ZeroStep step, find_step(path, /*is_run=*/true));
  ModelFiles files{step.directory, step.models, {}, {}, {}, {}};
  files.names.insert(files.names.end(), step.optimizers.begin(), step.optimizers.end());
  if (step.is_universal) {
    files.roots.resize(step.models.size());
    if (!step.optimizers.empty()) files.roots.emplace_back("optimizer_state_dict");
  }
  for (const ZeroStep::Whole& whole : step.wholes) {
    files.names.push_back(text(kUniversalFolder, "/", whole.parameter, "/", whole.key, ".pt"));
    files.roots.push_back(whole.key);
  }
  files.stored = files.names;
  BCP_ASSIGN_OR_RETURN(format::Manifest manifest, read_torch_files(files));
  BCP_RETURN_IF_ERROR(join_zero_parts(step, &manifest));
  manifest.planner_data = {};
  manifest.foreign->format = "torch";
  if (step.directory != path) manifest.foreign->directory = step.directory;
  return manifest;
}

}  // namespace bytecheckpoint::engine
