// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/power_loss.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "csrc/base/bytes.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/rounds.h"

// Power loss at every change of a save, in every way that a disk may lose what was not synced. About 5,000 states, or a
// million with BCP_LONG=1 in the environment. BCP_SEED=n selects other states.

namespace bytecheckpoint::test {
namespace {

using Kind = io::FileSystemChange::Kind;

constexpr int kStates = 460;  // of each of eleven scenarios
constexpr int kLongStates = 91000;

bool is_long() {
  const char* wish = std::getenv("BCP_LONG");
  return wish != nullptr && std::string(wish) == "1";
}

uint64_t seed() {
  const char* wish = std::getenv("BCP_SEED");
  return wish == nullptr ? 1 : std::strtoull(wish, nullptr, 10);
}

PowerLossTally survey(const JournaledSaves& saves, int64_t num_states, engine::Scope watched, bool until_violated) {
  const auto begin = std::chrono::steady_clock::now();
  const PowerLossTally tally = PowerLossSurvey(saves, watched, seed()).run(num_states, until_violated);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::string line = base::text(saves.journal().size(), " changes, ", tally.states, " states (", tally.undecided,
                                " with a rename under way) in ", seconds.count(), " s, ", tally.verified, " verified, ",
                                tally.saved_again, " saved into; loaded");
  for (const auto& [number, times] : tally.loaded) line += base::text(" ", number, ": ", times);
  line += base::text("; violations: ", tally.violations);
  if (is_long()) MESSAGE(line);
  return tally;
}

/// Expects all states to be allowed ones. \param share  Number of parts of the scenario, which share its states.
void expect_safe(const JournaledSaves& saves, engine::Scope watched = {}, int share = 1) {
  const int64_t wanted = (is_long() ? kLongStates : rounds(kStates)) / share;
  const PowerLossTally tally = survey(saves, wanted, watched, false);
  CHECK(tally.states >= wanted);
  CHECK_MESSAGE(tally.violations == 0, tally.first_violation);
}

/// Expects a violation in some state.
void expect_seen(const JournaledSaves& saves, engine::Scope watched = {}) {
  CHECK(survey(saves, kStates, watched, true).violations > 0);
}

TEST_CASE("power_loss: in a first save, into directories that it makes") {
  JournaledSaves saves("runs/7/last", 1);
  saves.save({1});
  expect_safe(saves);
}

TEST_CASE("power_loss: in a save over an older one") {
  JournaledSaves saves("last", 1);
  saves.save({1});
  saves.save({2});
  expect_safe(saves);
}

TEST_CASE("power_loss: in a save of several ranks over an older one") {
  JournaledSaves saves("last", 3);
  saves.save({1});
  saves.save({2});
  expect_safe(saves);
}

TEST_CASE("power_loss: in saves in a row") {
  JournaledSaves saves("runs/last", 2);
  for (const uint8_t number : {1, 2, 3}) saves.save({number});
  expect_safe(saves);
}

TEST_CASE("power_loss: in a save that may not replace another, and one that is refused") {
  JournaledSaves saves("last", 2);
  saves.save({1, {}, /*overwrite=*/false});
  saves.refused_save({2, {}, /*overwrite=*/false});
  expect_safe(saves);
}

TEST_CASE("power_loss: in a save that fails, over an older one") {
  JournaledSaves saves("last", 2);
  saves.save({1});
  saves.abort_save({2});
  expect_safe(saves);
}

TEST_CASE("power_loss: in a first save that fails and one that follows") {
  JournaledSaves saves("runs/last", 1);
  saves.abort_save({1});
  saves.save({2});
  expect_safe(saves);
}

TEST_CASE("power_loss: in a save on what an earlier loss of power has left") {
  const int ruins = is_long() ? 30 : 5;
  std::mt19937_64 random(seed());
  for (int i = 0; i < ruins; ++i) {
    JournaledSaves saves("last", 2);
    saves.save({1});
    saves.save({2});
    const std::vector<SimulatedDisk> disks = saves.disks();
    const size_t half = disks.size() / 2;  // within the second save
    const DiskTree left = disks[half + random() % (disks.size() - half)].random_tree(&random);
    const TempDir dir(memory_root());
    ShownTree(dir.path()).show(left);
    const Loaded loaded = load_numbered(dir / saves.directory(), {}, saves.num_ranks());
    REQUIRE_MESSAGE(loaded.fault.empty(), loaded.fault);
    saves.lose_power(left, loaded.number);
    saves.save({3});
    expect_safe(saves, {}, ruins);
  }
}

TEST_CASE("power_loss: in a save that follows one that was killed") {
  JournaledSaves model("last", 1);
  model.save({1});
  const size_t first = model.journal().size();
  model.save({2});
  const size_t both = model.journal().size();
  const size_t step = is_long() ? 1 : 4;
  const auto parts = static_cast<int>((both - first + step - 1) / step);
  for (size_t point = first; point < both; point += step) {
    JournaledSaves saves("last", 1);
    saves.save({1});
    saves.save({2});
    REQUIRE(saves.journal().size() == both);
    saves.kill(point);
    saves.save({3});
    CAPTURE(point);
    expect_safe(saves, {}, parts);
  }
}

TEST_CASE("power_loss: in saves of ranks on their own") {
  JournaledSaves saves("last", 2);
  saves.save({1, 0});
  saves.save({2, 1});
  saves.save({3, 0});
  expect_safe(saves, 0, 2);
  expect_safe(saves, 1, 2);
}

TEST_CASE("power_loss: in a save of all ranks over those of ranks on their own") {
  JournaledSaves saves("last", 2);
  saves.save({1, 0});
  saves.save({2, 1});
  saves.save({3});
  for (const engine::Scope watched : {engine::Scope(), engine::Scope(0), engine::Scope(1)}) {
    expect_safe(saves, watched, 3);
  }
}

// Disks that lie, and saves in another order. The survey must notice each, or the cases above prove nothing.

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

/// Positions of the changes of `kind` in [begin, end) whose path ends in `ending`.
std::vector<size_t> changes(const JournaledSaves& saves, Kind kind, const std::string& ending, size_t begin = 0,
                            size_t end = SIZE_MAX) {
  std::vector<size_t> out;
  for (size_t i = begin; i < std::min(end, saves.journal().size()); ++i) {
    if (saves.journal()[i].kind == kind && ends_with(saves.journal()[i].path, ending)) out.push_back(i);
  }
  return out;
}

size_t last_rename(const JournaledSaves& saves) {
  return changes(saves, Kind::kRename, ".tmp").back();
}

void ignore(JournaledSaves* saves, const std::vector<size_t>& positions) {
  REQUIRE_FALSE(positions.empty());
  for (const size_t position : positions) saves->ignore(position);
}

/// Two saves of two ranks, the second over the first.
struct TwoSaves : JournaledSaves {
  TwoSaves() : JournaledSaves("last", 2) {
    save({1});
    begin = journal().size();
    save({2});
  }
  size_t begin;  // first change of the second save
};

TEST_CASE("power_loss: a disk that does not sync data files is seen") {
  TwoSaves saves;
  ignore(&saves, changes(saves, Kind::kSyncFile, ".distcp", saves.begin));
  expect_seen(saves);
}

TEST_CASE("power_loss: a disk that does not sync one of the data files is seen") {
  TwoSaves saves;
  saves.ignore(changes(saves, Kind::kSyncFile, ".distcp", saves.begin).at(0));
  expect_seen(saves);
}

TEST_CASE("power_loss: a disk that does not sync the metadata is seen") {
  TwoSaves saves;
  ignore(&saves, changes(saves, Kind::kSyncFile, ".tmp", saves.begin));
  expect_seen(saves);
}

TEST_CASE("power_loss: a disk that does not sync the names of data files is seen") {
  TwoSaves saves;
  ignore(&saves, changes(saves, Kind::kSyncDirectory, "/last", saves.begin, last_rename(saves)));
  expect_seen(saves);
}

TEST_CASE("power_loss: a disk that does not sync the rename is seen, by what had returned") {
  JournaledSaves saves("last", 1);
  saves.save({1});
  ignore(&saves, changes(saves, Kind::kSyncDirectory, "/last", last_rename(saves)));
  expect_seen(saves);
}

TEST_CASE("power_loss: a disk that does not sync before old files are removed is seen") {
  TwoSaves saves;
  ignore(&saves, changes(saves, Kind::kSyncDirectory, "/last", last_rename(saves)));
  expect_seen(saves);
}

TEST_CASE("power_loss: a disk that does not sync for the sweep of a save that follows a killed one is seen") {
  for (const bool lies : {false, true}) {
    TwoSaves saves;
    saves.kill(last_rename(saves) + 1);
    const size_t killed = saves.journal().size();
    saves.save({3});
    // Only removals of the sweep at the start of the third save matter, because the first of them has no other sync
    // before it.
    const size_t removal = changes(saves, Kind::kRemoveFile, ".distcp", killed).at(0);
    const std::vector<size_t> syncs = changes(saves, Kind::kSyncDirectory, "/last", killed, removal);
    REQUIRE(syncs.size() == 1);
    if (lies) saves.ignore(syncs[0]);
    const PowerLossTally tally = survey(saves, kStates / 4, {}, lies);
    CHECK((tally.violations > 0) == lies);
  }
}

TEST_CASE("power_loss: a disk that does not sync directories that hold the new one is seen") {
  JournaledSaves saves("runs/7/last", 1);
  saves.save({1});
  SUBCASE("above") {
    ignore(&saves, changes(saves, Kind::kSyncDirectory, "/runs"));
  }
  SUBCASE("right above") {
    ignore(&saves, changes(saves, Kind::kSyncDirectory, "/7"));
  }
  expect_seen(saves);
}

TEST_CASE("power_loss: a rename before the metadata are synced is seen") {
  TwoSaves saves;
  const size_t sync = changes(saves, Kind::kSyncFile, ".tmp", saves.begin).back();
  REQUIRE(sync + 1 == last_rename(saves));
  std::swap(saves.journal_to_change()->at(sync), saves.journal_to_change()->at(sync + 1));
  expect_seen(saves);
}

TEST_CASE("power_loss: a removal of old files before the commit is synced is seen") {
  TwoSaves saves;
  std::vector<io::FileSystemChange>& journal = *saves.journal_to_change();
  const size_t removal = changes(saves, Kind::kRemoveFile, ".distcp", last_rename(saves)).at(0);
  std::rotate(journal.begin() + static_cast<std::ptrdiff_t>(last_rename(saves)) + 1,
              journal.begin() + static_cast<std::ptrdiff_t>(removal),
              journal.begin() + static_cast<std::ptrdiff_t>(removal) + 1);
  expect_seen(saves);
}

TEST_CASE("power_loss: a save without sync is seen") {
  JournaledSaves saves("last", 1);
  saves.save({1});
  saves.save({2, {}, true, /*sync=*/false});
  expect_seen(saves);
}

}  // namespace
}  // namespace bytecheckpoint::test
