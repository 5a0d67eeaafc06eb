// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/commit/assemble.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string_view>
#include <unordered_map>

#include "csrc/base/index_table.h"
#include "csrc/base/order_by_name.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

/// The record that was written for one planned chunk; null if there is none yet.
struct WrittenChunk {
  const format::WrittenRecord* record = nullptr;
  uint32_t file = 0;
};

/// Finds the planned chunks of items by their offsets.
///
/// Ranks mostly hand in records in the order of the chunks, so the chunk behind the last match is tried first. If it
/// does not match, a binary search follows: over the item's chunks, or over their sorted numbers where offsets do not
/// ascend or come twice.
class ChunkMatcher {
 public:
  explicit ChunkMatcher(const std::vector<format::Item>& items) : items_(items), next_(items.size(), 0) {
    first_.reserve(items.size() + 1);
    size_t num_chunks = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      first_.push_back(num_chunks);
      num_chunks += items[i].chunks.size();
      sort_chunks(i);
    }
    first_.push_back(num_chunks);
    written_.resize(num_chunks);
  }

  /// Notes the record of a planned chunk of an item; a later one replaces an earlier one. A record that was not planned
  /// is ignored.
  void note(size_t item, const format::WrittenRecord& record, uint32_t file) {
    const tensor::Dims& offsets = record.box.offsets;
    const std::vector<format::Chunk>& chunks = items_[item].chunks;
    WrittenChunk* const written = written_.data() + first_[item];
    const auto unordered = sorted_.find(item);
    if (unordered == sorted_.end()) {
      const auto offsets_of = [&](size_t n) -> const tensor::Dims& { return chunks[n].box.offsets; };
      uint32_t& next = next_[item];
      if (next >= chunks.size() || offsets_of(next) != offsets) next = lower_bound(chunks.size(), offsets, offsets_of);
      if (next < chunks.size() && offsets_of(next) == offsets) written[next++] = {&record, file};
      return;
    }
    const std::vector<size_t>& sorted = unordered->second;
    const auto offsets_of = [&](size_t n) -> const tensor::Dims& { return chunks[sorted[n]].box.offsets; };
    for (size_t n = lower_bound(chunks.size(), offsets, offsets_of); n < chunks.size() && offsets_of(n) == offsets;
         ++n) {
      written[sorted[n]] = {&record, file};
    }
  }

  const WrittenChunk& written(size_t item, size_t chunk) const { return written_[first_[item] + chunk]; }

 private:
  void sort_chunks(size_t item) {
    const std::vector<format::Chunk>& chunks = items_[item].chunks;
    const auto is_before = [](const format::Chunk& a, const format::Chunk& b) { return a.box.offsets < b.box.offsets; };
    const auto is_out_of_order = [&](const format::Chunk& a, const format::Chunk& b) { return !is_before(a, b); };
    if (std::adjacent_find(chunks.begin(), chunks.end(), is_out_of_order) == chunks.end()) return;
    std::vector<size_t>& sorted = sorted_[item];
    sorted.resize(chunks.size());
    std::iota(sorted.begin(), sorted.end(), size_t{0});
    std::sort(sorted.begin(), sorted.end(), [&](size_t a, size_t b) { return is_before(chunks[a], chunks[b]); });
  }

  template <class OffsetsOf>
  static uint32_t lower_bound(size_t num_chunks, const tensor::Dims& offsets, const OffsetsOf& offsets_of) {
    size_t low = 0, high = num_chunks;
    while (low < high) {
      const size_t middle = low + (high - low) / 2;
      if (offsets_of(middle) < offsets) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return static_cast<uint32_t>(low);
  }

  const std::vector<format::Item>& items_;
  std::vector<size_t> first_;          // where in written_ the chunks of an item begin
  std::vector<WrittenChunk> written_;  // of all chunks, by item
  std::vector<uint32_t> next_;         // of each item: the chunk behind the last match
  // Numbers of the chunks, sorted by offsets, of the items whose chunks are not sorted.
  std::unordered_map<size_t, std::vector<size_t>> sorted_;
};

Status fill_chunk(const format::Item& item, const WrittenChunk& written, format::Chunk* chunk) {
  if (written.record == nullptr) {
    return Status::make(Code::kInvalidArgument, text("'", item.fqn, "' chunk at ", tensor::to_text(chunk->box.offsets),
                                                     ": planned, but written by no rank"));
  }
  const format::WrittenRecord& record = *written.record;
  const bool is_bytes = record.record.kind == format::RecordKind::kBytes;
  if (is_bytes == item.is_tensor || !(record.box == chunk->box)) {
    return Status::make(
        Code::kInvalidArgument,
        text("'", item.fqn, "' chunk at ", tensor::to_text(chunk->box.offsets), ": planned as ",
             item.is_tensor ? "a tensor" : "bytes", " of ", tensor::to_text(chunk->box.sizes), ", written as ",
             is_bytes ? "bytes" : "a tensor", " of ", tensor::to_text(record.box.sizes)));
  }
  chunk->record = record.record;
  chunk->record.file = written.file;
  return Status::ok();
}

Status fill_item(const ChunkMatcher& matcher, size_t number, format::Item* item) {
  if (item->is_tensor && tensor::find_dtype(item->tensor.dtype) == nullptr) {
    return Status::make(Code::kInvalidArgument, text("'", item->fqn, "': unknown dtype"));
  }
  for (size_t c = 0; c < item->chunks.size(); ++c) {
    BCP_RETURN_IF_ERROR(fill_chunk(*item, matcher.written(number, c), &item->chunks[c]));
  }
  return Status::ok();
}

/// Finds items by their names. Ranks write in the order of their state dicts, so the item behind the last one found, in
/// the state dict that was planned, is tried first.
class ItemNumbers {
 public:
  explicit ItemNumbers(const std::vector<format::Item>& items) : items_(items), by_ordinal_(items.size(), kNone) {
    for (uint32_t i = 0; i < items.size(); ++i) {
      if (items[i].ordinal < by_ordinal_.size()) by_ordinal_[items[i].ordinal] = i;
    }
  }

  /// \returns kNone if there is no such item.
  uint32_t find(std::string_view fqn) {
    const auto is_same = [&](uint32_t number) { return items_[number].fqn == fqn; };
    uint32_t number = next_ < by_ordinal_.size() ? by_ordinal_[next_] : kNone;
    if (number == kNone || !is_same(number)) {
      if (table_.size() == 0) fill_table();
      number = table_.find(std::hash<std::string_view>()(fqn), is_same);
    }
    if (number != kNone) next_ = size_t{items_[number].ordinal} + 1;
    return number;
  }

  static constexpr uint32_t kNone = base::IndexTable::kNone;

 private:
  void fill_table() {
    for (uint32_t i = 0; i < items_.size(); ++i) table_.insert(std::hash<std::string_view>()(items_[i].fqn), i);
  }

  const std::vector<format::Item>& items_;
  std::vector<uint32_t> by_ordinal_;  // numbers of the items, by their positions in the state dict
  size_t next_ = 0;
  base::IndexTable table_;
};

}  // namespace

base::Result<format::Manifest> assemble_manifest(format::Manifest manifest,
                                                 const std::vector<format::WriteResult>& results, Gaps gaps) {
  const std::vector<uint32_t> order =
      base::order_by_name(manifest.items.size(), [&](uint32_t i) -> std::string_view { return manifest.items[i].fqn; });
  const auto twice = std::adjacent_find(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return manifest.items[a].fqn == manifest.items[b].fqn;
  });
  if (twice != order.end()) {
    return Status::make(Code::kInvalidArgument, text("'", manifest.items[*twice].fqn, "': planned twice"));
  }
  ChunkMatcher matcher(manifest.items);
  ItemNumbers numbers(manifest.items);
  for (const format::WriteResult& result : results) {
    const auto first_file = static_cast<uint32_t>(manifest.files.size());
    manifest.files.insert(manifest.files.end(), result.files.begin(), result.files.end());
    for (const format::WrittenRecord& record : result.records) {
      const uint32_t number = numbers.find(record.fqn);
      if (number != ItemNumbers::kNone) matcher.note(number, record, first_file + record.record.file);
    }
  }
  CoverageCheck coverage;
  for (size_t i = 0; i < manifest.items.size(); ++i) {
    BCP_RETURN_IF_ERROR(coverage.check(gaps, &manifest.items[i]));
    BCP_RETURN_IF_ERROR(fill_item(matcher, i, &manifest.items[i]));
  }
  std::vector<format::Item> sorted;
  sorted.reserve(order.size());
  for (const uint32_t number : order) sorted.push_back(std::move(manifest.items[number]));
  manifest.items = std::move(sorted);
  return manifest;
}

}  // namespace bytecheckpoint::engine
