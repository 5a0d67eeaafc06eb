// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/assemble.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string_view>

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

/// Finds the planned chunks of one item by their offsets.
///
/// Ranks mostly hand in records in the order of the chunks, so the chunk behind the last match is tried first. If it
/// does not match, a binary search follows: over the chunks, or over their sorted numbers where offsets do not ascend
/// or come twice.
class ItemMatcher {
 public:
  explicit ItemMatcher(const format::Item& item) : item_(item), written_(item.chunks.size()) {
    const auto is_before = [](const format::Chunk& a, const format::Chunk& b) { return a.box.offsets < b.box.offsets; };
    for (size_t c = 1; c < item.chunks.size() && ascending_; ++c) {
      ascending_ = is_before(item.chunks[c - 1], item.chunks[c]);
    }
    if (ascending_) return;
    sorted_.resize(item.chunks.size());
    std::iota(sorted_.begin(), sorted_.end(), size_t{0});
    std::sort(sorted_.begin(), sorted_.end(),
              [&](size_t a, size_t b) { return is_before(item.chunks[a], item.chunks[b]); });
  }

  /// Notes the record of a planned chunk; a later one replaces an earlier one. A record that was not planned is
  /// ignored.
  void note(const format::WrittenRecord& record, uint32_t file) {
    const tensor::Dims& offsets = record.box.offsets;
    if (ascending_) {
      if (next_ >= written_.size() || offsets_of(next_) != offsets) next_ = lower_bound(offsets);
      if (next_ < written_.size() && offsets_of(next_) == offsets) written_[next_++] = {&record, file};
      return;
    }
    for (size_t n = lower_bound(offsets); n < sorted_.size() && offsets_of(n) == offsets; ++n) {
      written_[sorted_[n]] = {&record, file};
    }
  }

  const WrittenChunk& written(size_t chunk) const { return written_[chunk]; }

 private:
  /// Returns the offsets of the n-th chunk in ascending order.
  const tensor::Dims& offsets_of(size_t n) const { return item_.chunks[ascending_ ? n : sorted_[n]].box.offsets; }

  size_t lower_bound(const tensor::Dims& offsets) const {
    size_t low = 0, high = written_.size();
    while (low < high) {
      const size_t middle = low + (high - low) / 2;
      if (offsets_of(middle) < offsets) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  const format::Item& item_;
  std::vector<WrittenChunk> written_;  // by number of the chunk
  bool ascending_ = true;
  std::vector<size_t> sorted_;  // numbers of the chunks, sorted by offsets; empty if the chunks are sorted
  size_t next_ = 0;
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

Status fill_item(const ItemMatcher& matcher, format::Item* item) {
  if (item->is_tensor && tensor::find_dtype(item->tensor.dtype) == nullptr) {
    return Status::make(Code::kInvalidArgument, text("'", item->fqn, "': unknown dtype"));
  }
  for (size_t c = 0; c < item->chunks.size(); ++c) {
    BCP_RETURN_IF_ERROR(fill_chunk(*item, matcher.written(c), &item->chunks[c]));
  }
  return Status::ok();
}

/// Finds items by their names. Records mostly come in the order of the items, so the item behind the last one found is
/// tried first.
class ItemNumbers {
 public:
  explicit ItemNumbers(const std::vector<format::Item>& items) : items_(items) {}

  /// \returns kNone if there is no such item.
  uint32_t find(std::string_view fqn) {
    const auto is_same = [&](uint32_t number) { return items_[number].fqn == fqn; };
    uint32_t number = next_;
    if (number >= items_.size() || !is_same(number)) {
      if (table_.size() == 0) fill_table();
      number = table_.find(std::hash<std::string_view>()(fqn), is_same);
    }
    if (number != kNone) next_ = number + 1;
    return number;
  }

  static constexpr uint32_t kNone = base::IndexTable::kNone;

 private:
  void fill_table() {
    for (uint32_t i = 0; i < items_.size(); ++i) table_.insert(std::hash<std::string_view>()(items_[i].fqn), i);
  }

  const std::vector<format::Item>& items_;
  uint32_t next_ = 0;
  base::IndexTable table_;
};

}  // namespace

base::Result<format::Manifest> assemble_manifest(format::Manifest manifest,
                                                 const std::vector<format::WriteResult>& results, Gaps gaps) {
  const std::vector<uint32_t> order = base::order_by_name(
      manifest.items.size(), [&](uint32_t i) -> std::string_view { return manifest.items[i].fqn; });
  const auto twice = std::adjacent_find(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return manifest.items[a].fqn == manifest.items[b].fqn;
  });
  if (twice != order.end()) {
    return Status::make(Code::kInvalidArgument, text("'", manifest.items[*twice].fqn, "': planned twice"));
  }
  std::vector<ItemMatcher> matchers;
  matchers.reserve(manifest.items.size());
  for (const format::Item& item : manifest.items) matchers.emplace_back(item);
  ItemNumbers numbers(manifest.items);
  for (const format::WriteResult& result : results) {
    const auto first_file = static_cast<uint32_t>(manifest.files.size());
    manifest.files.insert(manifest.files.end(), result.files.begin(), result.files.end());
    for (const format::WrittenRecord& record : result.records) {
      const uint32_t number = numbers.find(record.fqn);
      if (number != ItemNumbers::kNone) matchers[number].note(record, first_file + record.record.file);
    }
  }
  CoverageCheck coverage;
  for (size_t i = 0; i < manifest.items.size(); ++i) {
    BCP_RETURN_IF_ERROR(coverage.check(gaps, &manifest.items[i]));
    BCP_RETURN_IF_ERROR(fill_item(matchers[i], &manifest.items[i]));
  }
  std::vector<format::Item> sorted;
  sorted.reserve(order.size());
  for (const uint32_t number : order) sorted.push_back(std::move(manifest.items[number]));
  manifest.items = std::move(sorted);
  return manifest;
}

}  // namespace bytecheckpoint::engine
