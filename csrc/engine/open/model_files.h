// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::engine {

/// How the files of a model are named, in one format.
struct ModelNames {
  std::string_view format;  // for messages
  std::string_view prefix;  // of the files in a folder that belong to a model
  std::string_view suffix;
  std::string_view index_suffix;
  std::string_view default_name;  // what is tried below a URL that cannot be listed
  std::string_view default_index;
};

/// The files of a model, and the index if there is one.
struct ModelFiles {
  std::string directory;
  std::vector<std::string> names;                          // as users know them, sorted
  std::vector<std::pair<std::string, std::string>> index;  // each tensor and its file, sorted; empty without an index
  std::vector<std::string> stored;                         // what to open in `directory`, in the order of `names`
  format::DescribingFile index_file;                       // without a name if there is none
  std::string note;                                        // for users: what else is there, and is not taken
  std::vector<std::string> roots{};  // what the names in each file begin with; empty: with nothing
};

/// Finds the files of a model.
///
///     path                              what is found
///     ----                              -------------
///     a folder with an index            the files that it names. If the name of the index without .index.json is
///                                       that of a file which it does not name: that file, as transformers does
///     a folder with files of the model  all of them; if they are numbered `-00001-of-00003`, all must be there
///     a file with the suffix, an index  that file; the files that it names
///
/// The links of Hugging Face's cache (`snapshots/REVISION/NAME` to `../../blobs/DIGEST`) are followed: `directory` and
/// `stored` are then of what they lead to. Other links are refused.
///
/// \param path  A local path, or a URL whose store is registered.
/// \returns kNotFound if there are none. kCorrupt for a damaged index or a missing numbered file. kUnsupported for
/// several indices, and for links. kStorage.
base::Result<ModelFiles> find_model_files(const std::string& path, const ModelNames& names);
/// The same for one file, whatever its name.
base::Result<ModelFiles> find_model_file(const std::string& path);

/// Returns kNotFound: neither a checkpoint nor `what` is at `path`.
base::Status no_checkpoint(const std::string& path, std::string_view what);
/// Returns the names in a folder. \returns kNotFound, as `no_checkpoint` says it, if it is no folder. kStorage.
base::Result<std::vector<std::string>> names_to_search(const std::string& path, std::string_view what);

/// Returns the failure of opening a file of the model. One that is missing although an index names it is kCorrupt.
base::Status file_failure(const ModelFiles& files, base::Status failure);

/// Completes the items of all files: sorts them, and of each name keeps one. \param items  Each with a chunk.
/// \returns kCorrupt for a name that two files have, unless the index says which is meant, and for a name that is not
/// in the file that the index says. kChanged if the index was replaced since it was read.
base::Status join_items(const ModelFiles& files, format::Manifest* manifest);

}  // namespace bytecheckpoint::engine
