// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/power_loss.h"

#include <algorithm>

#include "csrc/base/bytes.h"
#include "csrc/engine/check/verify_job.h"
#include "csrc/engine/open/open_checkpoint.h"
#include "csrc/io/directory.h"
#include "tests/cpp/expect.h"

namespace bytecheckpoint::test {
namespace {

// One in so many new trees is verified, and one is saved into.
constexpr int64_t kVerifyEvery = 8, kSaveEvery = 50;
// After this many random trees of one point in a row that were all known, the survey leaves the point.
constexpr int kBarren = 300;
constexpr int kDrawsAtOnce = 16;
constexpr int kFaulty = -1;
constexpr uint8_t kSaveAgain = 250;

std::string verified(const std::string& directory, bool is_there) {
  engine::VerifyOptions options;
  options.directory = directory;
  options.direct_io = false;
  options.ring_bytes = 16 << 20;
  const auto report = engine::verify_checkpoint(options, [](int64_t, int64_t) { return true; });
  if (!report.is_ok()) {
    return !is_there && report.status().code() == base::Code::kNotFound ? "" : "verify: " + report.status().message();
  }
  return report.value().problems.empty() ? "" : "verify: " + report.value().problems[0].message;
}

}  // namespace

PowerLossSurvey::PowerLossSurvey(const JournaledSaves& saves, engine::Scope watched, uint64_t seed)
    : saves_(saves),
      watched_(watched),
      random_(seed),
      disks_(saves.disks()),
      dir_(memory_root()),
      directory_(dir_ / saves.directory()),
      shown_(dir_.path()) {
  for (size_t point = 0; point < disks_.size(); ++point) allowed_.push_back(saves.allowed(point, watched));
}

const PowerLossTally& PowerLossSurvey::run(int64_t num_states, bool until_violated) {
  const auto over = [&] { return until_violated && tally_.violations > 0; };
  const auto num_points = static_cast<int64_t>(disks_.size());
  // At most half of the states go to landmarks, so points with few leave room for those with many.
  const int64_t each = std::max<int64_t>(2, num_states / 2 / num_points);
  for (size_t point = 0; point < disks_.size(); ++point) {
    const int64_t landmarks = disks_[point].num_landmarks();
    look_at(point, disks_[point].latest());
    for (int64_t i = 0; i < std::min(landmarks, each) && !over(); ++i) {
      const bool all = landmarks <= each;
      look_at(point, disks_[point].landmark(all || i == 0 ? i : static_cast<int64_t>(random_() % landmarks)));
    }
  }
  std::vector<int> barren(disks_.size(), 0);
  for (bool any = true; any && !over() && tally_.states < num_states;) {
    any = false;
    for (size_t point = 0; point < disks_.size(); ++point) {
      for (int draw = 0; draw < kDrawsAtOnce && barren[point] < kBarren && tally_.states < num_states; ++draw) {
        barren[point] = look_at(point, disks_[point].random_tree(&random_)) ? 0 : barren[point] + 1;
        any = true;
      }
    }
  }
  return tally_;
}

bool PowerLossSurvey::look_at(size_t point, const DiskTree& tree) {
  const auto [seen, is_new] = seen_.emplace(tree.hash(), kFaulty);
  std::string fault;
  if (is_new) {
    seen->second = examine(tree, &fault);
    ++tally_.states;
    tally_.undecided += allowed_[point].size() > 1 ? 1 : 0;
    if (seen->second >= 0) ++tally_.loaded[seen->second];
  }
  // A known tree may still be wrong at this point: a state from before the save must not appear after the save
  // returned.
  const std::set<int>& allowed = allowed_[point];
  if (!fault.empty()) {
    violate(point, tree, fault);
  } else if (seen->second >= 0 && allowed.count(seen->second) == 0) {
    violate(point, tree, base::text("loads as ", seen->second, ", wanted ", *allowed.rbegin()));
  }
  return is_new;
}

int PowerLossSurvey::examine(const DiskTree& tree, std::string* fault) {
  shown_.show(tree);
  const Loaded loaded = load_numbered(directory_, watched_, saves_.num_ranks());
  *fault = loaded.fault;
  if (fault->empty() && tally_.states % kVerifyEvery == 0) {
    // If there is no mark of the watched scope, there may be others, and they must be whole too.
    *fault = verified(directory_, loaded.number != 0);
    ++tally_.verified;
  }
  if (fault->empty() && tally_.states % kSaveEvery == 0) {
    *fault = save_again();
    ++tally_.saved_again;
  }
  return fault->empty() ? loaded.number : kFaulty;
}

std::string PowerLossSurvey::save_again() {
  shown_.forget();
  // A save of one rank is refused if a checkpoint of a save with collectives exists.
  const bool global = engine::open_checkpoint(directory_).is_ok();
  NumberedSave wish;
  wish.number = kSaveAgain;
  if (!global) wish.scope = watched_;
  std::vector<std::string> wanted = save_numbered(directory_, wish, saves_.num_ranks());
  const Loaded loaded = load_numbered(directory_, wish.scope, saves_.num_ranks());
  if (!loaded.fault.empty()) return "saved again: " + loaded.fault;
  if (loaded.number != kSaveAgain) return base::text("saved again, loads as ", loaded.number);
  if (wish.scope.has_value()) return "";  // other ranks may have files there
  wanted.push_back(engine::mark_name({}));
  std::sort(wanted.begin(), wanted.end());
  std::vector<std::string> names = value_of(io::list_directory(directory_));
  std::sort(names.begin(), names.end());
  return names == wanted ? "" : base::text("saved again, ", names.size(), " names are left of ", wanted.size());
}

void PowerLossSurvey::violate(size_t point, const DiskTree& tree, const std::string& what) {
  if (tally_.violations++ != 0) return;
  tally_.first_violation = base::text("power lost after ", point, " of ", saves_.journal().size(), " changes: ", what);
  for (const auto& [path, content] : tree.files) {
    tally_.first_violation += base::text("\n  ", path, ": ", content->bytes.size(), " bytes");
  }
}

}  // namespace bytecheckpoint::test
