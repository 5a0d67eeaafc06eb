// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/check/unreferenced.h"

#include <algorithm>

#include "csrc/engine/commit/lock_file.h"
#include "csrc/engine/commit/named_files.h"
#include "csrc/engine/names.h"
#include "csrc/io/directory.h"

namespace bytecheckpoint::engine {
namespace {

using base::text;

// Stock DCP locks nothing.
constexpr std::string_view kStockTmp = ".metadata.tmp";

bool is_regular(const std::string& path) {
  const base::Result<io::EntryType> type = io::entry_type(path);
  return type.is_ok() && type.value() == io::EntryType::kRegular;
}

/// What we may not look at may well be held.
bool may_be_held(const std::string& path) {
  const base::Result<bool> held = LockFile::is_seen_held(path);
  return !held.is_ok() || held.value();
}

/// Returns a note for each tmp of a save.
std::vector<std::string> tmps_in(const std::string& directory, std::vector<std::string> listing) {
  std::sort(listing.begin(), listing.end());
  std::vector<std::string> notes;
  for (const std::string& name : listing) {
    const std::string path = io::join(directory, name);
    if (name == kStockTmp) notes.push_back(text(name, ": a save of stock DCP is under way, or has died"));
    if (!is_tmp_name(name) || !is_regular(path)) continue;
    notes.push_back(
        text(name, may_be_held(path)
                       ? ": a save is under way"
                       : ": a save is under way elsewhere, or has died; this host does not see that its lock is held"));
  }
  return notes;
}

/// Returns a note for each commit mark whose save has not ended.
std::vector<std::string> held_marks_in(const std::string& directory, const std::vector<std::string>& listing) {
  std::vector<std::string> notes;
  for (const std::string& name : listing) {
    if (name != kMetadataName && !is_rank_metadata_name(name)) continue;
    if (!may_be_held(io::join(directory, name))) continue;
    notes.push_back(text(name, ": was committed just now; its save removes older files"));
  }
  return notes;
}

}  // namespace

base::Result<Unreferenced> find_unreferenced(const std::string& directory) {
  Unreferenced out;
  // Lists the data files first: a save creates its tmp before them, and commits a mark that names them before its tmp
  // is gone.
  BCP_ASSIGN_OR_RETURN(std::vector<std::string> candidates, io::list_directory(directory));
  BCP_ASSIGN_OR_RETURN(const std::vector<std::string> listing, io::list_directory(directory));
  std::sort(candidates.begin(), candidates.end());
  out.notes = tmps_in(directory, listing);
  const auto named = named_files(directory, listing);
  if (!named.is_ok()) {
    out.notes.push_back(text("unreferenced files were not looked for: ", named.status().message()));
    return out;
  }
  const auto is_other = [&](const std::string& name) {
    return !is_data_file_of_any_writer(name) || name == kStockTmp || named.value().count(name) != 0;
  };
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(), is_other), candidates.end());
  if (candidates.empty()) return out;
  if (out.notes.empty()) out.notes = held_marks_in(directory, listing);
  if (out.notes.empty()) {
    // Looks again for a save that began since, and committed before the marks were read: it removes files that were
    // listed.
    BCP_ASSIGN_OR_RETURN(const std::vector<std::string> after, io::list_directory(directory));
    out.notes = tmps_in(directory, after);
    if (out.notes.empty()) out.notes = held_marks_in(directory, after);
  }
  const bool may_be_saving = !out.notes.empty();
  for (const std::string& name : candidates) {
    if (!is_regular(io::join(directory, name))) continue;
    if (may_be_saving) {
      out.notes.push_back(text(name, ": no commit mark refers to it, or not yet"));
    } else {
      out.files.push_back(name);
    }
  }
  return out;
}

}  // namespace bytecheckpoint::engine
