// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/save/linked_files.h"

#include <cerrno>

#include "csrc/engine/open/check_files.h"
#include "csrc/io/directory.h"
#include "csrc/io/late_changes.h"

namespace bytecheckpoint::engine {

void LinkedFiles::link(const LinkTarget& target, const LastSave& last, LinkRule rule,
                       const std::vector<TensorToWrite>& tensors, std::vector<const SavedRecord*>* records,
                       io::IoDeadline* deadline) {
  const std::vector<bool> to_link = files_to_link(last, *records, rule);
  constexpr uint32_t kNotLinked = UINT32_MAX;
  std::vector<uint32_t> number(last.files.size(), kNotLinked);  // of each file, among those that are linked
  for (size_t f = 0; f < last.files.size(); ++f) {
    const SavedFile& file = last.files[f];
    if (!to_link[f] || !is_linked(target, io::join(last.directory, file.entry.name), file.entry, deadline)) continue;
    number[f] = static_cast<uint32_t>(result_.files.size());
    result_.files.push_back(file.entry);
    saved_.files.push_back({file.entry, file.num_links + 1});
    num_bytes_ += file.entry.bytes;
  }
  for (size_t t = 0; t < tensors.size(); ++t) {
    const SavedRecord*& record = (*records)[t];
    if (record == nullptr || number[record->record.file] == kNotLinked) continue;
    SavedRecord saved = *record;
    saved.record.file = number[record->record.file];
    result_.records.push_back({*tensors[t].fqn, saved.box, saved.record});
    saved_.records[*tensors[t].fqn].push_back(std::move(saved));
    record = nullptr;
  }
}

bool LinkedFiles::is_linked(const LinkTarget& target, const std::string& from, const format::FileEntry& file,
                            io::IoDeadline* deadline) {
  const std::string to = io::join(target.directory, file.name);
  const auto link = [from, to] { return io::link_file(from, to); };
  // The coordinator has made the directory; this machine may see it late.
  base::Status outcome = deadline->run(
      "link", to, [target, link] { return io::ask_until_seen(target.directory, target.visibility_timeout_s, link); });
  if (outcome.is_ok()) {
    outcome = deadline->run("check", to, [target, file, to] {
      BCP_RETURN_IF_ERROR(check_files(target.directory, {file}));
      return target.sync ? io::sync_file(to) : base::Status::ok();
    });
    if (outcome.is_ok()) {
      names_.push_back(file.name);
      return true;
    }
    (void)deadline->run("unlink", to, [to] { return io::remove_file(to); });
  }
  if (refused_.is_ok()) refused_ = std::move(outcome);
  return false;
}

void LinkedFiles::add_to(format::WriteResult* result, LastSave* saved) const {
  const auto behind = static_cast<uint32_t>(result->files.size());
  result->files.insert(result->files.end(), result_.files.begin(), result_.files.end());
  for (format::WrittenRecord written : result_.records) {
    written.record.file += behind;
    result->records.push_back(std::move(written));
  }
  saved->files.insert(saved->files.end(), saved_.files.begin(), saved_.files.end());
  for (const auto& [fqn, records] : saved_.records) {
    for (SavedRecord record : records) {
      record.record.file += behind;
      saved->records[fqn].push_back(std::move(record));
    }
  }
}

}  // namespace bytecheckpoint::engine
