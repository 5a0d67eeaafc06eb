// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/rank_files.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>

#include "csrc/engine/open/checkpointing_step.h"
#include "csrc/format/torch/stored_tensor.h"
#include "csrc/io/directory.h"
#include "csrc/planner/coverage.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr std::string_view kWhatOfRanks = "files of ranks";

constexpr std::string_view kWorldSize = "_world_size_", kRank = "_rank_", kSuffix = ".pt";

std::optional<int> number_in(std::string_view digits) {
  constexpr size_t kMostDigits = 7;
  if (digits.empty() || digits.size() > kMostDigits || digits.find_first_not_of("0123456789") != std::string_view::npos)
    return std::nullopt;
  return std::stoi(std::string(digits));
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

/// Whether a value of a file cannot be read, and is not known to be a tensor.
bool is_refused(const format::Item& item) {
  return !item.is_tensor && item.chunks.front().record.kind == format::RecordKind::kRefused;
}

/// The checksum that a file has of exactly these elements.
std::optional<uint32_t> crc_of(const format::ForeignMeta& foreign, const format::Record& record) {
  using Place = std::pair<uint32_t, int64_t>;
  const Place place(record.file, record.data_offset);
  auto at = std::lower_bound(
      foreign.crcs.begin(), foreign.crcs.end(), place,
      [](const format::StoredCrc& crc, const Place& wanted) { return Place(crc.file, crc.offset) < wanted; });
  for (; at != foreign.crcs.end() && Place(at->file, at->offset) == place; ++at) {
    if (at->bytes == record.data_bytes) return at->crc;
  }
  return std::nullopt;
}

/// Whether two copies are known to differ. Elements are not read: only their checksums are compared, where both files
/// have one.
bool are_different(const format::ForeignMeta& foreign, const format::Record& a, const format::Record& b) {
  if (a.kind != b.kind) return false;
  if (a.kind == format::RecordKind::kInline) return foreign.text_of(a) != foreign.text_of(b);
  if (a.kind != format::RecordKind::kTensor || a.data_bytes != b.data_bytes) return false;
  const std::optional<uint32_t> of_a = crc_of(foreign, a), of_b = crc_of(foreign, b);
  return of_a.has_value() && of_b.has_value() && *of_a != *of_b;
}

/// Drops what several ranks have of one value, and remembers what differs.
class Copies {
 public:
  Copies(const ModelFiles& files, format::ForeignMeta* foreign) : files_(files), foreign_(*foreign) {}

  /// Adds what a further rank has under a name.
  Status add(format::Item* first, format::Item other) {
    if (is_refused(*first) || is_refused(other)) {
      // Of a tensor, a part would then be missing.
      if (is_refused(other) && first->is_tensor) *first = std::move(other);
      return Status::ok();
    }
    BCP_RETURN_IF_ERROR(check_same(files_, *first, other));
    format::Chunk& chunk = other.chunks.front();
    if (first->is_tensor) {
      first->chunks.push_back(std::move(chunk));
    } else if (are_different(foreign_, first->chunks.front().record, chunk.record)) {
      note(*first);
    }
    return Status::ok();
  }

  /// Keeps of each box the part of the lowest rank, and drops those without elements if there are others.
  void drop(format::Item* item) {
    std::vector<format::Chunk>& chunks = item->chunks;
    std::stable_sort(chunks.begin(), chunks.end(), is_before);
    const tensor::Box whole = tensor::whole(item->tensor.sizes);
    size_t kept = 0;
    for (size_t c = 1; c < chunks.size() && tensor::has_elements(chunks[c].box); ++c) {
      if (!(chunks[c].box == chunks[kept].box)) {
        if (++kept != c) chunks[kept] = std::move(chunks[c]);
      } else if (are_different(foreign_, chunks[kept].record, chunks[c].record)) {
        if (chunks[c].box == whole) {
          note(*item);
        } else {
          refuse(*item, chunks[c].record.file, &chunks[kept].record);
        }
      }
    }
    chunks.resize(kept + 1);
  }

  /// Checks that what is left of a tensor is of one save: parts of another number of ranks overlap those of this one.
  Status check_parts(const format::Item& item) {
    if (item.chunks.size() < 2) return Status::ok();
    boxes_.clear();
    for (const format::Chunk& chunk : item.chunks) boxes_.add(chunk.box);
    const auto fault = planner::find_tiling_fault(boxes_.boxes(item.tensor.sizes.size()), item.tensor.sizes);
    if (!fault.has_value() || !fault->is_overlap()) return Status::ok();
    const auto describe = [&](size_t number) {
      const format::Chunk& chunk = item.chunks[number];
      return text(files_.names[chunk.record.file], " has the part at ", tensor::to_text(chunk.box.offsets), " of ",
                  tensor::to_text(chunk.box.sizes));
    };
    return Status::make(Code::kCorrupt,
                        text("open(", files_.directory, "): '", item.fqn, "': ", describe(fault->overlap.first),
                             ", and ", describe(fault->overlap.second),
                             ": they are of two saves; move the files away that ", "another one has left"),
                        files_.directory);
  }

  /// Returns what to tell users; "" if no copies differ.
  std::string note() const {
    if (different_.empty()) return {};
    const size_t others = different_.size() - 1;
    return text(files_.directory, ": the ranks have different values of '", different_.front(), "'",
                others == 0 ? std::string() : text(" and of ", others, " more"),
                "; those of the lowest rank are taken: for those of another rank pass the path of its file");
  }

 private:
  static bool is_before(const format::Chunk& a, const format::Chunk& b) {
    const bool is_empty = !tensor::has_elements(a.box), is_other_empty = !tensor::has_elements(b.box);
    if (is_empty != is_other_empty) return is_other_empty;
    return a.box.offsets != b.box.offsets ? a.box.offsets < b.box.offsets : a.box.sizes < b.box.sizes;
  }

  void note(const format::Item& item) {
    if (different_.empty() || different_.back() != item.fqn) different_.push_back(item.fqn);
  }

  /// Ranks of several meshes, as of pipeline or expert parallelism, may call different tensors the same.
  void refuse(const format::Item& item, uint32_t other, format::Record* record) {
    if (record->kind == format::RecordKind::kRefused) return;
    const std::string reason = text("'", item.fqn, "' cannot be read: ", files_.names[record->file], " and ",
                                    files_.names[other], " have different elements of the same part of it, as if it ",
                                    "were several tensors of one name: load these files with torch.load");
    record->offset = record->bytes = 0;
    format::set_text(format::RecordKind::kRefused, reason, &foreign_, record);
  }

  const ModelFiles& files_;
  format::ForeignMeta& foreign_;
  std::vector<std::string> different_;
  planner::BoxNumbers boxes_;
};

}  // namespace

std::optional<RankFile> parse_rank_file(std::string_view name) {
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

base::Result<ModelFiles> find_rank_files(const std::string& path) {
  const std::string last = io::name_of(path);
  const auto asked = parse_rank_file(last);
  const bool is_of_kind = asked.has_value() && asked->rank == -1;
  const std::string directory = is_of_kind ? io::parent_of(path) : path;
  const std::string kind = is_of_kind ? std::string(asked->kind) : "model";
  BCP_ASSIGN_OR_RETURN(const std::vector<std::string> listed, names_to_search(directory, kWhatOfRanks));
  std::map<int, std::set<int>> ranks;  // by the number of ranks
  for (const std::string& name : listed) {
    const auto found = parse_rank_file(name);
    if (!found.has_value() || found->kind != kind || found->rank < 0) continue;
    const bool is_wanted = is_of_kind ? found->world_size == asked->world_size : found->world_size > 0;
    if (is_wanted && (found->world_size == 0 || found->rank < found->world_size)) {
      ranks[found->world_size].insert(found->rank);
    }
  }
  if (ranks.empty() && !is_of_kind && std::count(listed.begin(), listed.end(), kStepMetadataName) != 0)
    return find_checkpointing_step(directory, listed);
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
  Copies copies(files, &*manifest->foreign);
  for (format::Item& item : items) {
    if (joined.empty() || joined.back().fqn != item.fqn) {
      joined.push_back(std::move(item));
    } else {
      BCP_RETURN_IF_ERROR(copies.add(&joined.back(), std::move(item)));
    }
  }
  for (format::Item& item : joined) {
    if (!item.is_tensor) continue;
    copies.drop(&item);
    BCP_RETURN_IF_ERROR(copies.check_parts(item));
  }
  const std::string note = copies.note();
  manifest->foreign->note = text(files.note, files.note.empty() || note.empty() ? "" : "; ", note);
  items = std::move(joined);
  return Status::ok();
}

}  // namespace bytecheckpoint::engine
