// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/check/folder_coverage.h"

#include <deque>
#include <map>

#include "csrc/base/mutex.h"
#include "csrc/base/per_process.h"
#include "csrc/engine/open/open_checkpoint.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr int64_t kMaxWholeMetadataBytes = 32 << 20;
constexpr size_t kMaxJudged = 4096;

/// What was found about the saves that this process judged last. A save id is drawn anew for each save, so a result
/// stays true.
class JudgedSaves {
 public:
  std::optional<std::string> find(const base::Id& save_id) {
    const base::MutexLock lock(mutex_);
    const auto found = faults_.find(save_id);
    return found == faults_.end() ? std::optional<std::string>() : found->second;
  }

  void keep(const base::Id& save_id, const std::string& fault) {
    const base::MutexLock lock(mutex_);
    if (!faults_.emplace(save_id, fault).second) return;
    order_.push_back(save_id);
    if (order_.size() <= kMaxJudged) return;
    faults_.erase(order_.front());
    order_.pop_front();
  }

 private:
  base::Mutex mutex_;
  std::map<base::Id, std::string> faults_ BCP_GUARDED_BY(mutex_);
  std::deque<base::Id> order_ BCP_GUARDED_BY(mutex_);
};

std::string and_more(const std::string& first, size_t more) {
  return more == 0 ? first : text(first, ", and ", more, more == 1 ? " more tensor" : " more tensors");
}

base::Result<std::string> fault_of(CommitMark* mark) {
  CoverageCheck check;
  std::string first;
  size_t num_faults = 0;
  BCP_RETURN_IF_ERROR(mark->for_each_item([&](const format::Item& item) {
    std::string fault = check.fault(item);
    if (!fault.empty() && num_faults++ == 0) first = std::move(fault);
  }));
  return num_faults == 0 ? first : and_more(first, num_faults - 1);
}

}  // namespace

base::Result<CommitMark> CommitMark::open(const std::string& directory, Scope scope) {
  const base::Result<io::File> mark = io::File::open(directory, mark_name(scope), /*direct=*/false);
  const base::Result<int64_t> size = mark.is_ok() ? mark.value().size() : base::Result<int64_t>(0);
  if (size.is_ok() && size.value() > kMaxWholeMetadataBytes) {
    base::Result<ManifestReader> reader = ManifestReader::open(directory, scope);
    if (reader.is_ok()) {
      // What is remembered of a save says nothing about bytes that have changed since.
      BCP_RETURN_IF_ERROR(reader.value().check_blocks());
      BCP_ASSIGN_OR_RETURN(format::Manifest head, reader.value().read_head());
      return CommitMark(std::move(head), std::move(reader.value()));
    }
    // The metadata of other writers can only be read whole.
    if (reader.status().code() != Code::kUnsupported) return reader.status();
  }
  BCP_ASSIGN_OR_RETURN(format::Manifest manifest, open_checkpoint(directory, {scope, /*check_pickle=*/true}));
  return CommitMark(std::move(manifest), std::nullopt);
}

Status FolderCoverage::add(CommitMark* mark) {
  if (of_parts_) return mark->for_each_item([&](const format::Item& item) { parts_.add(item); });
  const bool is_ours = !mark->head().foreign.has_value();
  const std::optional<std::string> known =
      is_ours ? base::of_process<JudgedSaves>().find(mark->head().save_id) : std::nullopt;
  if (known.has_value()) {
    fault_ = *known;
    return Status::ok();
  }
  BCP_ASSIGN_OR_RETURN(fault_, fault_of(mark));
  if (is_ours) base::of_process<JudgedSaves>().keep(mark->head().save_id, fault_);
  return Status::ok();
}

std::string FolderCoverage::fault() {
  if (!of_parts_) return fault_;
  const auto faults = parts_.faults();
  return faults.empty() ? "" : and_more(faults.front().second, faults.size() - 1);
}

}  // namespace bytecheckpoint::engine
