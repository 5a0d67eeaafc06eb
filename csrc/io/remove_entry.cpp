// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/remove_entry.h"

#include <cerrno>
#include <optional>
#include <utility>

#include "csrc/io/directory.h"

namespace bytecheckpoint::io {
namespace {

using base::Status;

constexpr size_t kMaxFailures = 5;

/// Walks through all that is below an entry, with one directory open at a time: it goes up by `..`, and checks where
/// that led.
class RemovalWalk {
 public:
  RemovalWalk(const OpenDirectory& top, const RemovalRules& rules, bool removes)
      : top_(top), rules_(rules), removes_(removes) {}

  base::Result<RemovalOutcome> run(const std::string& name) {
    BCP_RETURN_IF_ERROR(visit(top_, name));
    while (!levels_.empty() && out_.kept.empty()) {
      if (levels_.back().left.empty()) {
        BCP_RETURN_IF_ERROR(leave());
        continue;
      }
      const std::string next = std::move(levels_.back().left.back());
      levels_.back().left.pop_back();
      BCP_RETURN_IF_ERROR(visit(*at_, next));
    }
    return std::move(out_);
  }

 private:
  /// A directory that the walk is in.
  struct Level {
    std::string name;  // in the directory above
    OpenDirectory::Place place;
    std::vector<std::string> left;  // to be visited
  };

  void fail(Status failure) {
    if (out_.failures.size() < kMaxFailures) out_.failures.push_back(std::move(failure));
  }

  Status visit(const OpenDirectory& in, const std::string& name) {
    BCP_RETURN_IF_ERROR(rules_.may_go_on());
    base::Result<OpenDirectory::Entry> entry = in.entry(name);
    if (entry.status().sys_errno() == ENOENT) return Status::ok();
    if (!entry.is_ok()) {
      fail(entry.status());
      return Status::ok();
    }
    BCP_RETURN_IF_ERROR(rules_.may_go_on());
    // It would be taken from its reader. The directory stays with it, which is a failure of its own.
    if (entry.value().may_be_held) return Status::ok();
    const Status outcome = entry.value().is_directory ? enter(in, name) : remove_file(in, name, entry.value().bytes);
    if (!outcome.is_ok()) fail(outcome);
    return Status::ok();
  }

  Status remove_file(const OpenDirectory& in, const std::string& name, int64_t bytes) {
    if (!levels_.empty() && rules_.stays(name)) {
      out_.kept = "it is a checkpoint of its own";
      return Status::ok();
    }
    if (removes_) BCP_RETURN_IF_ERROR(in.remove_file(name));
    out_.bytes += bytes;
    return Status::ok();
  }

  Status enter(const OpenDirectory& in, const std::string& name) {
    BCP_ASSIGN_OR_RETURN(OpenDirectory directory, in.open_below(name));
    Level level{name, {}, {}};
    BCP_ASSIGN_OR_RETURN(level.place, directory.place());
    BCP_ASSIGN_OR_RETURN(const OpenDirectory::Place above, in.place());
    if (level.place.device != above.device || level.place.mount != above.mount) {
      out_.kept = "another file system is mounted there";
      return Status::ok();
    }
    BCP_ASSIGN_OR_RETURN(level.left, directory.list());
    levels_.push_back(std::move(level));
    at_ = std::move(directory);
    return Status::ok();
  }

  Status leave() {
    BCP_RETURN_IF_ERROR(rules_.may_go_on());
    const std::string name = std::move(levels_.back().name);
    levels_.pop_back();
    const Status led_up = levels_.empty() ? Status::ok() : go_up();
    if (!led_up.is_ok()) {
      fail(led_up);
      levels_.clear();  // where this directory is now is not known
      return Status::ok();
    }
    BCP_RETURN_IF_ERROR(rules_.may_go_on());
    const Status outcome = removes_ ? (levels_.empty() ? top_ : *at_).remove_directory(name) : Status::ok();
    if (!outcome.is_ok()) fail(outcome);
    return Status::ok();
  }

  Status go_up() {
    BCP_ASSIGN_OR_RETURN(OpenDirectory above, at_->open_parent());
    BCP_ASSIGN_OR_RETURN(const OpenDirectory::Place place, above.place());
    if (!(place == levels_.back().place)) {
      return Status::storage("open", above.path(), "a directory in it was moved meanwhile", ESTALE);
    }
    at_ = std::move(above);
    return Status::ok();
  }

  const OpenDirectory& top_;
  const RemovalRules& rules_;
  const bool removes_;
  std::optional<OpenDirectory> at_;  // the last of levels_
  std::vector<Level> levels_;
  RemovalOutcome out_;
};

}  // namespace

base::Result<RemovalOutcome> remove_entry(const OpenDirectory& in, const std::string& name, const RemovalRules& rules) {
  BCP_ASSIGN_OR_RETURN(RemovalOutcome seen, RemovalWalk(in, rules, /*removes=*/false).run(name));
  const bool goes = seen.kept.empty() && seen.failures.empty();
  if (!goes) seen.bytes = 0;
  if (!goes || rules.dry_run) return seen;
  return RemovalWalk(in, rules, /*removes=*/true).run(name);
}

}  // namespace bytecheckpoint::io
