// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/save/linked_files.h"

#include <algorithm>
#include <cerrno>

#include "csrc/engine/open/check_files.h"
#include "csrc/io/directory.h"
#include "csrc/io/late_changes.h"
#include "csrc/io/object_store.h"

namespace bytecheckpoint::engine {

void LinkedFiles::link(const LinkTarget& target, const LastSave& last, LinkRule rule,
                       const std::vector<TensorToWrite>& tensors, std::vector<const SavedRecord*>* records,
                       io::IoDeadline* deadline) {
  const std::vector<bool> to_link = files_to_link(last, *records, rule);
  if (std::find(to_link.begin(), to_link.end(), true) == to_link.end()) return;
  if (!io::is_url(target.directory)) {
    // The coordinator has made the directory; this machine may see it late. A file that is missing is no such case.
    refused_ = deadline->run("open", target.directory, [target] {
      return io::ask_until_seen(target.directory, target.visibility_timeout_s,
                                [target] { return io::file_id(target.directory).status(); });
    });
    if (!refused_.is_ok()) return;
  }
  constexpr uint32_t kNotLinked = UINT32_MAX;
  std::vector<uint32_t> number(last.files.size(), kNotLinked);  // of each file, among those that are linked
  for (size_t f = 0; f < last.files.size(); ++f) {
    const SavedFile& file = last.files[f];
    if (!to_link[f] || !is_linked(target, io::join(last.directory, file.entry.name), file.entry, deadline)) continue;
    number[f] = static_cast<uint32_t>(saved_.files.size());
    saved_.files.push_back({file.entry, file.num_links + 1, 0});
    num_bytes_ += file.entry.bytes;
  }
  for (size_t t = 0; t < tensors.size(); ++t) {
    const SavedRecord*& record = (*records)[t];
    if (record == nullptr || number[record->record.file] == kNotLinked) continue;
    SavedRecord saved = *record;
    saved.record.file = number[record->record.file];
    bytes_in_use_ += saved.record.data_bytes;
    ++saved_.files[saved.record.file].num_tensors;
    saved_.records[*tensors[t].fqn].push_back(std::move(saved));
    record = nullptr;
  }
}

bool LinkedFiles::is_linked(const LinkTarget& target, const std::string& from, const format::FileEntry& file,
                            io::IoDeadline* deadline) {
  const std::string to = io::join(target.directory, file.name);
  base::Status outcome = deadline->run("link", to, [from, to]() -> base::Status {
    const base::Result<io::EntryType> type = io::is_url(from) ? io::EntryType::kRegular : io::entry_type(from);
    BCP_RETURN_IF_ERROR(type.status());
    if (type.value() == io::EntryType::kOther) {
      return base::Status::storage("link", from, "a symbolic link, or no file", ELOOP);
    }
    return io::link_file(from, to);
  });
  if (outcome.is_ok()) {
    // If it is not what it should be, the link stays until the commit sweeps it, or the save ends: whoever removed it
    // without the right to commit might remove that of another save.
    names_.push_back(file.name);
    outcome = deadline->run("check", to, [target, file, to] {
      BCP_RETURN_IF_ERROR(check_files(target.directory, {file}));
      return target.sync ? io::sync_file(to) : base::Status::ok();
    });
  }
  if (outcome.is_ok()) return true;
  if (refused_.is_ok()) refused_ = std::move(outcome);
  return false;
}

void LinkedFiles::add_to(format::WriteResult* result, LastSave* saved) const {
  const auto behind = static_cast<uint32_t>(result->files.size());
  for (const SavedFile& file : saved_.files) result->files.push_back(file.entry);
  saved->files.insert(saved->files.end(), saved_.files.begin(), saved_.files.end());
  for (const auto& [fqn, records] : saved_.records) {
    for (SavedRecord record : records) {
      record.record.file += behind;
      result->records.push_back({fqn, record.box, record.record});
      saved->records[fqn].push_back(std::move(record));
    }
  }
}

}  // namespace bytecheckpoint::engine
