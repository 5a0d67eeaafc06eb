// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/rank_files.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>
#include <set>
#include <string_view>

#include "csrc/io/directory.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr std::string_view kWhatOfRanks = "files of ranks";

constexpr std::string_view kWorldSize = "_world_size_", kRank = "_rank_", kSuffix = ".pt";

/// What the name of such a file says; a view into it.
struct RankFile {
  std::string_view kind;
  int world_size = 0;  // 0 if it does not say
  int rank = 0;        // -1 for `*`
};

std::optional<int> number_in(std::string_view digits) {
  constexpr size_t kMostDigits = 7;
  if (digits.empty() || digits.size() > kMostDigits || digits.find_first_not_of("0123456789") != std::string_view::npos)
    return std::nullopt;
  return std::stoi(std::string(digits));
}

std::optional<RankFile> parse(std::string_view name) {
  if (name.size() < kSuffix.size() || name.substr(name.size() - kSuffix.size()) != kSuffix) return std::nullopt;
  name.remove_suffix(kSuffix.size());
  const size_t line = name.rfind('_');
  if (line == std::string_view::npos) return std::nullopt;
  const std::string_view which = name.substr(line + 1);
  const auto rank = which == "*" ? std::optional<int>(-1) : number_in(which);
  if (!rank.has_value()) return std::nullopt;
  const std::string_view kind = name.substr(0, line);
  const size_t size = kind.rfind(kWorldSize), of = size + kWorldSize.size();
  if (size == std::string_view::npos) return RankFile{kind, 0, *rank};
  const size_t end = kind.find('_', of);
  const auto world_size = end == std::string_view::npos ? std::nullopt : number_in(kind.substr(of, end - of));
  if (!world_size.has_value() || *world_size == 0 || text(kind.substr(end), "_") != kRank) return std::nullopt;
  return RankFile{kind.substr(0, size), *world_size, *rank};
}

std::string name_of_rank(std::string_view kind, int world_size, const std::string& rank) {
  if (world_size == 0) return text(kind, "_", rank, kSuffix);
  return text(kind, kWorldSize, world_size, kRank, rank, kSuffix);
}

/// Whether two parts of a tensor can be of one. Parts that are the same box are copies.
Status check_same(const ModelFiles& files, const format::Item& first, const format::Item& other) {
  if (first.is_tensor == other.is_tensor && first.tensor.dtype == other.tensor.dtype &&
      first.tensor.sizes == other.tensor.sizes) {
    return Status::ok();
  }
  const auto describe = [&](const format::Item& item) {
    const tensor::DTypeInfo* dtype = item.is_tensor ? tensor::find_dtype(item.tensor.dtype) : nullptr;
    return text(
        files.names[item.chunks.front().record.file], " has ",
        dtype == nullptr ? std::string("an object") : text(dtype->name, " ", tensor::to_text(item.tensor.sizes)));
  };
  return Status::make(
      Code::kCorrupt,
      text("open(", files.directory, "): '", first.fqn, "': ", describe(first), ", and ", describe(other)),
      files.directory);
}

/// Keeps of each box the part of the lowest rank, and drops those without elements if there are others.
void drop_copies(std::vector<format::Chunk>* chunks) {
  const auto is_before = [](const tensor::Box& a, const tensor::Box& b) {
    return a.offsets != b.offsets ? a.offsets < b.offsets : a.sizes < b.sizes;
  };
  std::stable_sort(chunks->begin(), chunks->end(), [&](const format::Chunk& a, const format::Chunk& b) {
    const bool is_empty = !tensor::has_elements(a.box), is_other_empty = !tensor::has_elements(b.box);
    return is_empty != is_other_empty ? is_other_empty : is_before(a.box, b.box);
  });
  const auto end = std::unique(chunks->begin(), chunks->end(), [](const format::Chunk& a, const format::Chunk& b) {
    return a.box == b.box || !tensor::has_elements(b.box);
  });
  chunks->erase(end, chunks->end());
}

}  // namespace

base::Result<ModelFiles> find_rank_files(const std::string& path) {
  const std::string last = io::name_of(path);
  const auto asked = parse(last);
  const bool is_of_kind = asked.has_value() && asked->rank == -1;
  const std::string directory = is_of_kind ? io::parent_of(path) : path;
  const std::string kind = is_of_kind ? std::string(asked->kind) : "model";
  BCP_ASSIGN_OR_RETURN(const std::vector<std::string> listed, names_to_search(directory, kWhatOfRanks));
  std::map<int, std::set<int>> ranks;  // by the number of ranks
  for (const std::string& name : listed) {
    const auto found = parse(name);
    if (!found.has_value() || found->kind != kind || found->rank < 0) continue;
    const bool is_wanted = is_of_kind ? found->world_size == asked->world_size : found->world_size > 0;
    if (is_wanted && (found->world_size == 0 || found->rank < found->world_size)) {
      ranks[found->world_size].insert(found->rank);
    }
  }
  if (ranks.empty()) return no_checkpoint(path, kWhatOfRanks);
  const std::set<int>& there = ranks.begin()->second;
  const int world_size = ranks.begin()->first, num_ranks = world_size == 0 ? *there.rbegin() + 1 : world_size;
  if (ranks.size() > 1) {
    return Status::make(
        Code::kUnsupported,
        text("open(", directory, "): it has files of ", world_size, " ranks and of ", std::next(ranks.begin())->first,
             ": pass those of one job, as '", io::join(directory, name_of_rank(kind, world_size, "*")), "'"),
        directory);
  }
  ModelFiles files{directory, {}, {}, {}, {}, {}};
  for (int rank = 0; rank < num_ranks; ++rank) {
    files.names.push_back(name_of_rank(kind, world_size, std::to_string(rank)));
    if (there.count(rank) != 0) continue;
    const std::string missing = io::join(directory, files.names.back());
    return Status::make(Code::kCorrupt,
                        text("open(", missing, "): the file of rank ", rank, " is missing: ", there.size(), " of ",
                             num_ranks, " are there"),
                        missing, ENOENT);
  }
  files.stored = files.names;
  return files;
}

Status join_ranks(const ModelFiles& files, format::Manifest* manifest) {
  std::vector<format::Item>& items = manifest->items;
  std::stable_sort(items.begin(), items.end(),
                   [](const format::Item& a, const format::Item& b) { return a.fqn < b.fqn; });
  std::vector<format::Item> joined;
  for (format::Item& item : items) {
    if (joined.empty() || joined.back().fqn != item.fqn) {
      joined.push_back(std::move(item));
      continue;
    }
    format::Item& first = joined.back();
    BCP_RETURN_IF_ERROR(check_same(files, first, item));
    if (first.is_tensor) first.chunks.push_back(std::move(item.chunks.front()));
  }
  for (format::Item& item : joined) {
    if (item.is_tensor) drop_copies(&item.chunks);
  }
  items = std::move(joined);
  return Status::ok();
}

}  // namespace bytecheckpoint::engine
