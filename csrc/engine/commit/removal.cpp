// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/commit/removal.h"

#include <fnmatch.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "csrc/engine/commit/live_saves.h"
#include "csrc/engine/names.h"
#include "csrc/engine/random_id.h"

namespace bytecheckpoint::engine {

using base::Status;

base::Result<std::unique_ptr<Removal>> Removal::begin(const std::shared_ptr<const io::OpenDirectory>& directory) {
  BCP_ASSIGN_OR_RETURN(const base::Id id, draw_id());
  std::unique_ptr<Removal> removal(new Removal(directory, engine::tmp_name(id)));
  base::Result<LockFile> tmp = LockFile::create(directory, removal->tmp_name_);
  const int error = tmp.status().sys_errno();
  if (tmp.is_ok()) {
    removal->tmp_ = std::move(tmp.value());
  } else if (error == ENOSPC || error == EDQUOT) {
    removal->tmp_name_.clear();  // goes on without a tmp: removing is what frees space
  } else {
    return tmp.status();
  }
  // The destructor removes our tmp if anything fails from here on.
  BCP_RETURN_IF_ERROR(refuse_live_saves(directory->path(), removal->tmp_name_, {}, /*take_over=*/false));
  return removal;
}

Removal::~Removal() {
  if (!is_begun_) (void)tmp_.remove();
}

Status Removal::check_right() {
  if (tmp_name_.empty() || tmp_.has_name()) return Status::ok();
  return Status::make(base::Code::kSuperseded,
                      base::text("remove(", directory_->path(), "): a save took the right to change this folder"),
                      directory_->path());
}

Status Removal::write_note() {
  if (!tmp_.file().is_open()) return Status::ok();
  Status written = tmp_.file().write_at(kRemovalNote.data(), static_cast<int64_t>(kRemovalNote.size()), 0);
  if (written.is_ok()) written = tmp_.file().sync();
  const bool is_full = written.sys_errno() == ENOSPC || written.sys_errno() == EDQUOT;
  return is_full ? Status::ok() : written;  // removing is what frees space
}

base::Result<int64_t> Removal::remove_marks() {
  BCP_RETURN_IF_ERROR(check_right());
  BCP_ASSIGN_OR_RETURN(const std::vector<std::string> names, directory_->list());
  std::vector<std::pair<Scope, std::string>> marks;
  for (const std::string& name : names) {
    uint32_t rank;
    if (name == kMetadataName) marks.emplace_back(Scope(), name);
    if (is_rank_metadata_name(name, &rank)) marks.emplace_back(rank, name);
  }
  // Ascending by rank, since parts without rank 0's do not count as whole. `.metadata` last, since it hides the parts.
  std::sort(marks.begin(), marks.end(), [](const auto& a, const auto& b) {
    return std::make_pair(!a.first.has_value(), a.first) < std::make_pair(!b.first.has_value(), b.first);
  });
  BCP_RETURN_IF_ERROR(write_note());
  int64_t bytes = 0;
  for (const auto& [scope, name] : marks) {
    BCP_ASSIGN_OR_RETURN(const io::OpenDirectory::Entry mark, directory_->entry(name));
    BCP_RETURN_IF_ERROR(directory_->remove_file(name));
    bytes += mark.bytes;
    is_begun_ = true;
  }
  is_begun_ = true;
  BCP_RETURN_IF_ERROR(directory_->sync());
  return bytes;
}

Status Removal::finish() {
  is_begun_ = true;
  return tmp_name_.empty() ? Status::ok() : tmp_.remove();
}

base::Result<io::RemovalOutcome> remove_entry(const io::OpenDirectory& in, const std::string& name, Removal* right,
                                              const std::function<Status()>& may_go_on, const RemovalOptions& options) {
  io::RemovalRules rules;
  rules.dry_run = options.dry_run;
  rules.may_go_on = [&] {
    if (right != nullptr) BCP_RETURN_IF_ERROR(right->check_right());
    return may_go_on();
  };
  rules.stays = [&](const std::string& file) {
    const size_t metadata = file.size() - std::min(file.size(), kMetadataName.size());
    const auto fits = [&](const std::string& glob) { return ::fnmatch(glob.c_str(), file.c_str(), 0) == 0; };
    return file == kMetadataName ||
           (file.compare(0, 2, "__") == 0 && file.compare(metadata, file.npos, kMetadataName) == 0) ||
           std::any_of(options.stays.begin(), options.stays.end(), fits);
  };
  return io::remove_entry(in, name, rules);
}

}  // namespace bytecheckpoint::engine
