// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/checkpointing_step.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "csrc/engine/open/planned_files.h"
#include "csrc/engine/open/rank_files.h"
#include "csrc/format/pickle/pickle_reader.h"
#include "csrc/format/pickle/pickle_tree.h"
#include "csrc/io/directory.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;
using format::PickleSpan;
using format::PickleValue;
using Kind = format::PickleValue::Kind;

constexpr int64_t kMostMetadataBytes = int64_t{1} << 30;

struct Saved {
  std::map<std::string, std::set<int64_t>> parts;  // the ranks that have parts of each item that can be resharded
  std::set<int64_t> ranks;                         // all that saved
};

/// Reads the part of `metadata.pkl` that says who has written what:
///
///     {"metadata": {ITEM: {"nested_path_to_metadata": {PATH: [{"ranks": (0, 1), ...}, ...], ...},
///                          "rank_to_layout_info": {0: None, ...}}, ...}, ...}
class StepMetadata {
 public:
  explicit StepMetadata(const format::Pickle& pickle) : pickle_(pickle), budget_(pickle) {}

  /// \returns kUnsupported, without a path, if it is built otherwise. kCorrupt for one that shares too much.
  base::Result<Saved> read() {
    BCP_ASSIGN_OR_RETURN(const PickleValue items, find(pickle_.root(), "metadata"));
    Saved saved;
    const PickleSpan entries = pickle_.children(items);
    if (!items.is(Kind::kDict)) return other("it has no dict 'metadata'");
    for (auto at = entries.begin(); at != entries.end(); ++at) {
      const std::string item(pickle_.text(*at));
      ++at;
      BCP_RETURN_IF_ERROR(read_item(item, *at, &saved));
    }
    return saved;
  }

 private:
  static Status other(const std::string& why) { return Status::make(Code::kUnsupported, why); }

  Status read_item(const std::string& item, const PickleValue& value, Saved* saved) {
    BCP_ASSIGN_OR_RETURN(const PickleValue layouts, find(value, "rank_to_layout_info"));
    bool is_layout = false;
    for (const PickleValue& each : pickle_.children(layouts)) {
      BCP_RETURN_IF_ERROR(budget_.take(1));
      if (is_layout && !each.is(Kind::kNone))
        return other(text("the item '", item, "' is in files that an ItemSpec(layout=...) names"));
      if (!is_layout && each.is(Kind::kInt)) saved->ranks.insert(pickle_.integer(each));
      is_layout = !is_layout;
    }
    BCP_ASSIGN_OR_RETURN(const PickleValue paths, find(value, "nested_path_to_metadata"));
    if (!paths.is(Kind::kDict)) return other(text("the item '", item, "' has no dict of paths"));
    for (const PickleValue& of_path : pickle_.children(paths)) {
      BCP_RETURN_IF_ERROR(budget_.take(1));
      for (const PickleValue& part : pickle_.children(of_path)) {  // a path itself has no children
        BCP_ASSIGN_OR_RETURN(const PickleValue of_part, find(part, "ranks"));
        for (const PickleValue& rank : pickle_.children(of_part)) {
          BCP_RETURN_IF_ERROR(budget_.take(1));
          if (!rank.is(Kind::kInt)) return other(text("a rank of the item '", item, "' is no number"));
          saved->parts[item].insert(pickle_.integer(rank));
        }
      }
    }
    return Status::ok();
  }

  /// Returns a value of a dict; a hole if there is none, or no dict.
  base::Result<PickleValue> find(const PickleValue& dict, std::string_view key) {
    PickleValue found;
    if (!dict.is(Kind::kDict)) return found;
    const PickleSpan children = pickle_.children(dict);
    for (auto at = children.begin(); at != children.end(); ++at) {
      BCP_RETURN_IF_ERROR(budget_.take(1));
      const bool is_found = (*at).is(Kind::kString) && pickle_.text(*at) == key;
      ++at;
      if (is_found) found = *at;
    }
    return found;
  }

  const format::Pickle& pickle_;
  format::UnfoldBudget budget_;
};

base::Result<Saved> read_metadata(const std::string& directory, base::FileVersion* version) {
  const std::string name(kStepMetadataName), path = io::join(directory, name);
  BCP_ASSIGN_OR_RETURN(
      const Description described,
      read_description(directory, name, kMostMetadataBytes, "pass the files of one item, as 'FOLDER/model_*.pt'"));
  *version = described.version;
  const auto said = [&](const Status& failure) {
    return Status::make(failure.code(), text("read(", path, "): ", failure.message()), path);
  };
  const auto pickle = format::read_pickle(described.bytes, {[](auto, auto) { return std::nullopt; }});
  if (!pickle.is_ok()) return said(pickle.status());
  base::Result<Saved> saved = StepMetadata(pickle.value()).read();
  return saved.is_ok() ? std::move(saved) : said(saved.status());
}

/// Whether files of an item may be lost: an item is of all ranks that saved, or of the first alone.
bool may_lack(const std::set<int64_t>& ranks, const std::set<int64_t>& saved) {
  const bool is_of_first = ranks.size() == 1 && *ranks.begin() == 0;
  return !is_of_first && !std::includes(ranks.begin(), ranks.end(), saved.begin(), saved.end());
}

}  // namespace

base::Result<ModelFiles> find_checkpointing_step(const std::string& directory, const std::vector<std::string>& listed) {
  std::map<std::string, std::set<int64_t>> there;
  for (const std::string& name : listed) {
    const auto found = parse_rank_file(name);
    if (found.has_value() && found->world_size == 0 && found->rank >= 0 && !found->kind.empty())
      there[std::string(found->kind)].insert(found->rank);
  }
  if (there.empty()) return no_checkpoint(directory, "step of torch_checkpointing");
  ModelFiles files{directory, {}, {}, {}, {directory, std::string(kStepMetadataName), {}}, {}};
  BCP_ASSIGN_OR_RETURN(const Saved saved, read_metadata(directory, &files.index_file.version));
  for (const auto& [item, ranks] : saved.parts) {
    const std::set<int64_t>& of_item = there[item];
    for (const int64_t rank : ranks) {
      if (of_item.count(rank) != 0) continue;
      const std::string missing = io::join(directory, text(item, "_", rank, ".pt"));
      return Status::make(Code::kCorrupt,
                          text("open(", missing, "): the file of rank ", rank, " is missing: ", of_item.size(), " of ",
                               ranks.size(), " are there"),
                          missing, ENOENT);
    }
  }
  for (const auto& [item, ranks] : there) {
    if (may_lack(ranks, saved.ranks)) {
      files.note = text(files.note.empty() ? text(directory, ": ") : files.note + ", and ", "of '", item,
                        "' there are no files of all ", saved.ranks.size(), " ranks that saved");
    }
    for (const int64_t rank : ranks) {
      if (!saved.ranks.empty() && saved.ranks.count(rank) == 0) continue;
      files.names.push_back(text(item, "_", rank, ".pt"));
      files.roots.push_back(item);
    }
  }
  files.stored = files.names;
  return files;
}

}  // namespace bytecheckpoint::engine
