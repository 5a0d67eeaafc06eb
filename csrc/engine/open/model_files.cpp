// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/model_files.h"

#include <algorithm>
#include <cerrno>
#include <optional>

#include "csrc/engine/open/planned_files.h"
#include "csrc/format/safetensors/safetensors.h"
#include "csrc/io/directory.h"
#include "csrc/io/file.h"
#include "csrc/io/object_store.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr int64_t kMostIndexBytes = format::kMostSafetensorsHeaderBytes;
/// Where the links of a snapshot of Hugging Face's cache lead.
constexpr std::string_view kBlobs = "../../blobs/";
constexpr std::string_view kIndexSuffix = ".index.json";

bool ends_with(std::string_view name, std::string_view suffix) {
  return name.size() >= suffix.size() && name.substr(name.size() - suffix.size()) == suffix;
}

bool is_of_model(std::string_view name, std::string_view prefix, std::string_view suffix) {
  return name.substr(0, prefix.size()) == prefix && ends_with(name, suffix);
}

/// Fills in what the index `name` says. \param directory  Of the index itself, which may be that of blobs.
Status use_index(const std::string& directory, const std::string& name, ModelFiles* files) {
  files->index_file = {directory, name, {}};
  BCP_ASSIGN_OR_RETURN(const Description described, read_description(directory, name, kMostIndexBytes));
  files->index_file.version = described.version;
  auto index = format::read_safetensors_index(described.bytes);
  if (!index.is_ok()) return index.status().in_file(io::join(directory, name));
  files->index = std::move(index.value());
  for (const auto& [tensor, file] : files->index) files->names.push_back(file);
  std::sort(files->names.begin(), files->names.end());
  files->names.erase(std::unique(files->names.begin(), files->names.end()), files->names.end());
  return Status::ok();
}

/// Finds numbered files of which some are missing: `NAME-00001-of-00003.safetensors`. \returns kCorrupt, naming one.
Status check_numbers(const std::string& directory, const std::vector<std::string>& names, std::string_view suffix) {
  constexpr size_t kDigits = 5;
  constexpr std::string_view kOf = "-of-";
  const auto number_at = [](std::string_view name, size_t at) -> std::optional<int> {
    const std::string_view digits = name.substr(at, kDigits);
    if (digits.size() != kDigits || digits.find_first_not_of("0123456789") != std::string_view::npos)
      return std::nullopt;
    return std::stoi(std::string(digits));
  };
  for (const std::string& name : names) {
    const size_t of = name.rfind(kOf);
    if (of == std::string::npos || of < kDigits + 1 || of + kOf.size() + kDigits + suffix.size() != name.size())
      continue;
    const auto number = number_at(name, of - kDigits), count = number_at(name, of + kOf.size());
    if (!number.has_value() || !count.has_value()) continue;
    for (int i = 1; i <= *count; ++i) {
      std::string digits = std::to_string(i);
      digits.insert(0, kDigits - digits.size(), '0');
      const std::string other = name.substr(0, of - kDigits) + digits + name.substr(of);
      if (std::binary_search(names.begin(), names.end(), other)) continue;
      const std::string path = io::join(directory, other);
      return Status::make(Code::kCorrupt, text("open(", path, "): the file is missing, but ", name, " is there"), path,
                          ENOENT);
    }
  }
  return Status::ok();
}

/// Returns what a link in Hugging Face's cache leads to, relative to the folder of blobs; nothing for a regular file.
base::Result<std::optional<std::string>> blob_of(const std::string& directory, const std::string& name) {
  const base::Result<std::optional<std::string>> read = io::link_target(io::join(directory, name));
  if (!read.is_ok() && read.status().sys_errno() != ENOENT) return read.status();
  const std::optional<std::string> target = read.is_ok() ? read.value() : std::nullopt;
  if (!target.has_value()) return std::optional<std::string>();
  if (target->substr(0, kBlobs.size()) == kBlobs) return std::make_optional(target->substr(kBlobs.size()));
  return Status::make(Code::kUnsupported,
                      text("open(", io::join(directory, name), "): it is a symbolic link to ", *target,
                           ": pass the path of the file that it leads to, or of the folder of that file"),
                      io::join(directory, name));
}

/// Replaces names that are links of Hugging Face's cache by what they lead to. \returns the new names, in order.
base::Result<std::vector<std::string>> follow_links(ModelFiles* files) {
  std::vector<std::string> names = files->names;
  if (io::is_url(files->directory)) return names;
  size_t num_links = 0;
  for (std::string& name : names) {
    BCP_ASSIGN_OR_RETURN(std::optional<std::string> blob, blob_of(files->directory, name));
    if (!blob.has_value()) continue;
    name = std::move(*blob);
    ++num_links;
  }
  if (num_links == 0) return names;
  if (num_links != names.size()) {
    return Status::make(Code::kUnsupported,
                        text("open(", files->directory, "): some of its files are symbolic links and some are not"),
                        files->directory);
  }
  files->directory = io::join(files->directory, std::string(kBlobs.substr(0, kBlobs.size() - 1)));
  return names;
}

/// Opens the index, which may be a link of Hugging Face's cache.
Status use_index_in(const std::string& directory, const std::string& name, ModelFiles* files) {
  if (io::is_url(directory)) return use_index(directory, name, files);
  BCP_ASSIGN_OR_RETURN(const std::optional<std::string> blob, blob_of(directory, name));
  if (!blob.has_value()) return use_index(directory, name, files);
  return use_index(io::join(directory, std::string(kBlobs.substr(0, kBlobs.size() - 1))), *blob, files);
}

/// A web server has no listing: the names that Hugging Face gives are tried.
base::Result<ModelFiles> find_by_name(const std::string& url, const ModelNames& kinds) {
  ModelFiles files{url, {}, {}, {}, {}, {}};
  const auto file = io::File::open(url, std::string(kinds.default_name), /*direct=*/false);
  if (file.is_ok()) {
    files.names.emplace_back(kinds.default_name);
    return files;
  }
  if (file.status().sys_errno() != ENOENT) return file.status();
  const Status outcome = use_index(url, std::string(kinds.default_index), &files);
  if (outcome.is_ok()) return files;
  return outcome.sys_errno() == ENOENT ? no_checkpoint(url, kinds.format) : outcome;
}

/// Takes the files of a folder that has an index.
Status take_index(const std::string& index, ModelFiles* files) {
  const std::string single = index.substr(0, index.size() - kIndexSuffix.size());
  const auto has = [&](const ModelFiles& those) {
    return std::find(those.names.begin(), those.names.end(), single) != those.names.end();
  };
  ModelFiles of_index{files->directory, {}, {}, {}, {}, {}};
  Status outcome = use_index_in(files->directory, index, &of_index);
  if (!has(*files) || (outcome.is_ok() && has(of_index))) {
    *files = std::move(of_index);
    return outcome;
  }
  files->names = {single};
  files->note = text(io::join(files->directory, single), " is read, and not the files that ", index,
                     " beside it names, as transformers does; for those pass the path of the index");
  return Status::ok();
}

base::Result<ModelFiles> find_in_folder(const std::string& directory, const ModelNames& kinds) {
  BCP_ASSIGN_OR_RETURN(std::vector<std::string> listed, names_to_search(directory, kinds.format));
  if (listed.empty() && io::is_url(directory)) return find_by_name(directory, kinds);
  ModelFiles files{directory, {}, {}, {}, {}, {}};
  std::vector<std::string> indices;
  for (std::string& name : listed) {
    if (is_of_model(name, kinds.prefix, kinds.index_suffix))
      indices.push_back(std::move(name));
    else if (is_of_model(name, kinds.prefix, kinds.suffix))
      files.names.push_back(std::move(name));
  }
  if (indices.size() > 1) {
    std::sort(indices.begin(), indices.end());
    return Status::make(Code::kUnsupported,
                        text("open(", directory, "): it has ", indices.size(), " models: pass one, as '",
                             io::join(directory, indices.front()), "'"),
                        directory);
  }
  if (!indices.empty()) {
    BCP_RETURN_IF_ERROR(take_index(indices.front(), &files));
    return files;
  }
  if (files.names.empty()) return no_checkpoint(directory, kinds.format);
  std::sort(files.names.begin(), files.names.end());
  BCP_RETURN_IF_ERROR(check_numbers(directory, files.names, kinds.suffix));
  return files;
}

base::Result<ModelFiles> find_files(const std::string& path, const ModelNames& kinds) {
  const size_t slash = path.rfind('/');
  const bool is_index = ends_with(path, kinds.index_suffix);
  if (!is_index && !ends_with(path, kinds.suffix)) return find_in_folder(path, kinds);
  if (!io::is_url(path)) {
    BCP_ASSIGN_OR_RETURN(const bool is_file, io::leads_to_file(path));
    if (!is_file) return find_in_folder(path, kinds);
  }
  ModelFiles files{slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1)), {}, {}, {}, {}, {}};
  const std::string name = path.substr(slash + 1);
  if (is_index) {
    BCP_RETURN_IF_ERROR(use_index_in(files.directory, name, &files));
  } else {
    files.names.push_back(name);
  }
  return files;
}

/// Keeps of each name one item. Names that two files have are a fault, unless the index says which file is meant.
Status keep_one_each(const ModelFiles& files, std::vector<format::Item>* items) {
  std::sort(items->begin(), items->end(), [](const format::Item& a, const format::Item& b) {
    return a.fqn != b.fqn ? a.fqn < b.fqn : a.ordinal < b.ordinal;
  });
  const auto file_of = [&](const format::Item& item) { return files.names[item.chunks.front().record.file]; };
  std::vector<format::Item> kept;
  kept.reserve(items->size());
  auto indexed = files.index.begin();
  for (format::Item& item : *items) {
    while (indexed != files.index.end() && indexed->first < item.fqn) ++indexed;
    const bool is_indexed = indexed != files.index.end() && indexed->first == item.fqn;
    if (is_indexed && indexed->second != file_of(item)) continue;
    if (!kept.empty() && kept.back().fqn == item.fqn) {
      return Status::make(Code::kCorrupt,
                          text("open(", files.directory, "): both ", file_of(kept.back()), " and ", file_of(item),
                               " have '", item.fqn, "': pass the path of the file that is meant"),
                          files.directory);
    }
    kept.push_back(std::move(item));
  }
  *items = std::move(kept);
  return Status::ok();
}

Status check_index(const ModelFiles& files, const format::Manifest& manifest) {
  for (const auto& [name, file] : files.index) {
    if (manifest.find(name) != nullptr) continue;
    const std::string path = io::join(files.directory, file);
    return Status::make(Code::kCorrupt,
                        text("open(", path, "): the index says that '", name, "' is in this file, but it is not"),
                        path);
  }
  return Status::ok();
}

}  // namespace

base::Result<ModelFiles> find_model_files(const std::string& path, const ModelNames& names) {
  BCP_ASSIGN_OR_RETURN(ModelFiles files, find_files(path, names));
  BCP_ASSIGN_OR_RETURN(files.stored, follow_links(&files));
  return files;
}

base::Result<ModelFiles> find_model_file(const std::string& path) {
  const size_t slash = path.rfind('/');
  ModelFiles files{slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1)), {}, {}, {}, {}, {}};
  files.names.push_back(path.substr(slash + 1));
  BCP_ASSIGN_OR_RETURN(files.stored, follow_links(&files));
  return files;
}

Status no_checkpoint(const std::string& path, std::string_view what) {
  return Status::make(Code::kNotFound, text("open(", path, "): no checkpoint there, and no ", what), path, ENOENT);
}

base::Result<std::vector<std::string>> names_to_search(const std::string& path, std::string_view what) {
  base::Result<std::vector<std::string>> listed = io::list_directory(path);
  const int error = listed.is_ok() ? 0 : listed.status().sys_errno();
  if (error == ENOENT || error == ENOTDIR) return no_checkpoint(path, what);
  return listed;
}

Status file_failure(const ModelFiles& files, Status failure) {
  if (failure.sys_errno() != ENOENT || files.index.empty()) return failure;
  return Status::make(Code::kCorrupt, text("a file that the index names is missing: ", failure.message()),
                      failure.path(), ENOENT);
}

Status join_items(const ModelFiles& files, format::Manifest* manifest) {
  BCP_RETURN_IF_ERROR(keep_one_each(files, &manifest->items));
  BCP_RETURN_IF_ERROR(check_index(files, *manifest));
  manifest->foreign->description = files.index_file;
  if (!files.note.empty()) manifest->foreign->note = files.note;
  return check_description(*manifest);
}

}  // namespace bytecheckpoint::engine
