// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/journaled_saves.h"

#include <map>
#include <utility>

#include "csrc/engine/load/load_job.h"
#include "csrc/engine/open/open_checkpoint.h"
#include "csrc/io/directory.h"
#include "tests/cpp/aligned_bytes.h"
#include "tests/cpp/saved_checkpoint.h"
#include "tests/cpp/shown_tree.h"

namespace bytecheckpoint::test {
namespace {

using Kind = io::FileSystemChange::Kind;

constexpr int64_t kRows = 32, kColumns = 64;  // 8 KiB: enough sectors to tear in many ways
constexpr int64_t kElementBytes = 4;
const std::string kWeights = "weights";

/// The values that one rank saves in one save.
struct Values {
  std::string elements, note;
};

const Values& values_of(int number, uint32_t rank) {
  static std::map<std::pair<int, uint32_t>, Values> known;  // made once, because every load is compared with them
  Values& values = known[{number, rank}];
  if (values.note.empty()) {
    const uint32_t seed = static_cast<uint32_t>(number) * 64 + rank;
    values = {patterned(kRows * kColumns * kElementBytes, seed), patterned(900 + number % 7, seed + 32)};
  }
  return values;
}

std::string note_name(uint32_t rank) {
  return "note." + std::to_string(rank);
}

tensor::StridedView view_of(std::string* elements) {
  return {reinterpret_cast<uint8_t*>(elements->data()),
          tensor::DType::kFloat32,
          {kRows, kColumns},
          {kColumns * kElementBytes, kElementBytes}};
}

tensor::Box chunk_of(uint32_t place) {
  return {{kRows * place, 0}, {kRows, kColumns}};
}

/// The ranks of a save, in the order of their chunks.
std::vector<uint32_t> ranks_of(engine::Scope scope, uint32_t num_ranks) {
  if (scope.has_value()) return {*scope};
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < num_ranks; ++rank) ranks.push_back(rank);
  return ranks;
}

PendingSave begin_numbered(const std::string& directory, const NumberedSave& wish, uint32_t num_ranks) {
  const std::vector<uint32_t> ranks = ranks_of(wish.scope, num_ranks);
  std::vector<std::string> memory;
  for (const uint32_t rank : ranks) memory.push_back(values_of(wish.number, rank).elements);
  std::vector<std::vector<SaveItem>> of_ranks;
  for (uint32_t place = 0; place < ranks.size(); ++place) {
    const tensor::Dims whole = {kRows * static_cast<int64_t>(ranks.size()), kColumns};
    SaveItem note = bytes_item(values_of(wish.number, ranks[place]).note);
    note.fqn = note_name(ranks[place]);
    of_ranks.push_back({{kWeights, whole, chunk_of(place), view_of(&memory[place]), {}}, std::move(note)});
  }
  engine::CommitOptions options = commit_options(directory, wish.number);
  options.scope = wish.scope;
  options.overwrite = wish.overwrite;
  options.sync = wish.sync;
  return begin_save(std::move(options), of_ranks);
}

std::vector<std::string> names_of(const std::vector<format::FileEntry>& files) {
  std::vector<std::string> names;
  for (const format::FileEntry& file : files) names.push_back(file.name);
  return names;
}

}  // namespace

Loaded load_numbered(const std::string& directory, engine::Scope scope, uint32_t num_ranks) {
  const auto opened = engine::open_checkpoint(directory, {scope, /*check_pickle=*/true});
  if (!opened.is_ok()) {
    if (opened.status().code() == base::Code::kNotFound) return {};
    return {0, opened.status().message()};
  }
  const format::Manifest& manifest = opened.value();
  const uint8_t number = manifest.save_id.back();
  if (manifest.save_id != save_id_of(number)) return {0, "a save id that was never given"};
  const std::vector<uint32_t> ranks = ranks_of(scope, num_ranks);
  if (manifest.items.size() != 1 + ranks.size()) return {0, "items are missing or too many"};

  engine::LoadOptions options;
  options.directory = directory;
  options.scope = scope;
  options.direct_io = false;
  options.ring_bytes = 16 << 20;
  engine::LoadJob job(options, manifest);
  std::vector<std::pair<const std::string*, std::string>> wanted_and_got;  // must not move while the job runs
  wanted_and_got.reserve(2 * ranks.size());
  const format::Item* weights = manifest.find(kWeights);
  if (weights == nullptr || weights->chunks.size() != ranks.size()) return {0, "chunks are missing or too many"};
  for (uint32_t place = 0; place < ranks.size(); ++place) {
    const Values& values = values_of(number, ranks[place]);
    const format::Chunk& chunk = weights->chunks[place];
    const tensor::Box whole = {{0, 0}, chunk_of(place).sizes};
    if (!(chunk.box == chunk_of(place))) return {0, "a chunk of another box"};
    std::string& elements = wanted_and_got.emplace_back(&values.elements, "").second;
    elements.resize(kRows * kColumns * kElementBytes);
    const base::Status added =
        job.destinations().add_tensor(kWeights, chunk, engine::place_of(chunk), whole, view_of(&elements));
    if (!added.is_ok()) return {0, added.message()};
    const format::Item* note = manifest.find(note_name(ranks[place]));
    if (note == nullptr) return {0, "a note is missing"};
    std::string& bytes = wanted_and_got.emplace_back(&values.note, "").second;
    bytes.resize(static_cast<size_t>(note->chunks.at(0).record.bytes));
    job.destinations().add_bytes(note->chunks[0].record, reinterpret_cast<uint8_t*>(bytes.data()));
  }
  const base::Status outcome = job.run([] { return false; }).status();
  if (!outcome.is_ok()) return {0, outcome.message()};
  for (const auto& [wanted, got] : wanted_and_got) {
    if (*wanted != got) return {0, "values of another save, or of none"};
  }
  return {number, ""};
}

std::vector<std::string> save_numbered(const std::string& directory, const NumberedSave& wish, uint32_t num_ranks) {
  PendingSave pending = begin_numbered(directory, wish, num_ranks);
  EXPECT_OK(pending.finish());
  return names_of(pending.manifest.files);
}

template <class Run>
void JournaledSaves::record(const NumberedSave& wish, bool commits, Run&& run) {
  struct EndJournal {
    ~EndJournal() { io::keep_journal(nullptr); }
  };
  const io::Journal note = [this](io::FileSystemChange change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    journal_.push_back(std::move(change));
  };
  Span span{wish, journal_.size(), {}};
  {
    const EndJournal end;
    io::keep_journal(&note);
    run(io::join(root_.path(), directory_));
  }
  REQUIRE(renamed(span).has_value() == commits);
  if (commits) span.returned = journal_.size();
  spans_.push_back(span);
}

std::optional<size_t> JournaledSaves::renamed(const Span& span) const {
  const std::string tmp = "/" + engine::tmp_name(save_id_of(span.wish.number), span.wish.scope);
  for (size_t i = span.begun; i < journal_.size(); ++i) {
    const io::FileSystemChange& change = journal_[i];
    if (change.kind != Kind::kRename && change.kind != Kind::kLink) continue;
    if (change.path == io::join(root_.path(), directory_) + tmp) return i + 1;
  }
  return {};
}

void JournaledSaves::save(const NumberedSave& wish) {
  record(wish, true, [&](const std::string& directory) { save_numbered(directory, wish, num_ranks_); });
}

void JournaledSaves::abort_save(const NumberedSave& wish) {
  record(wish, false, [&](const std::string& directory) {
    const PendingSave pending = begin_numbered(directory, wish, num_ranks_);
    EXPECT_OK(pending.commit->abort(names_of(pending.manifest.files)));
  });
}

void JournaledSaves::refused_save(const NumberedSave& wish) {
  record(wish, false, [&](const std::string& directory) {
    engine::CommitOptions options = commit_options(directory, wish.number);
    options.scope = wish.scope;
    options.overwrite = wish.overwrite;
    EXPECT_CODE(kExists, engine::Commit::begin(std::move(options)));
  });
}

void JournaledSaves::kill(size_t num_changes) {
  REQUIRE(num_changes <= journal_.size());
  journal_.resize(num_changes);
  while (!spans_.empty() && spans_.back().begun >= num_changes) spans_.pop_back();
  for (Span& span : spans_) {
    if (span.returned > num_changes) span.returned.reset();
  }
  ShownTree(root_.path()).show(disks().back().latest());
}

void JournaledSaves::lose_power(const DiskTree& left, int number) {
  base_ = left;
  base_number_ = number;
  journal_.clear();
  spans_.clear();
  ShownTree(root_.path()).show(left);
}

std::vector<SimulatedDisk> JournaledSaves::disks() const {
  std::vector<SimulatedDisk> out = {SimulatedDisk(root_.path(), base_)};
  for (size_t i = 0; i < journal_.size(); ++i) {
    out.push_back(out.back());
    if (ignored_.count(i) == 0) out.back().apply(journal_[i]);
  }
  return out;
}

std::set<int> JournaledSaves::allowed(size_t num_changes, engine::Scope scope) const {
  std::set<int> numbers = {base_number_};
  for (const Span& span : spans_) {
    const std::optional<size_t> can_be_loaded = renamed(span);
    if (!can_be_loaded.has_value() || *can_be_loaded > num_changes) continue;
    if (span.wish.scope == scope) {
      if (span.returned.has_value() && *span.returned <= num_changes) numbers.clear();
      numbers.insert(span.wish.number);
    } else if (!span.wish.scope.has_value()) {
      numbers.insert(0);  // a save with collectives removes the checkpoints of single ranks
    }
  }
  return numbers;
}

}  // namespace bytecheckpoint::test
