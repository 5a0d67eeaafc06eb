// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/save/unchanged.h"

#include <algorithm>
#include <atomic>

#include "csrc/base/named_thread.h"
#include "csrc/staging/staged_bytes.h"
#include "csrc/staging/view_hash.h"

namespace bytecheckpoint::engine {
namespace {

/// Whether the tensor has what the record has. \param bytes_read  Gets the bytes that were read to find out.
bool is_same(const tensor::StridedView& view, const SavedRecord& saved, std::atomic<int64_t>* bytes_read) {
  const staging::KnownBytes known = staging::find_staged(view);
  if (!known.status.is_ok()) return false;  // whoever writes it says so
  // Of what was staged, not one byte is read again: a link has what was there when it was staged.
  if (known.hash.has_value()) return *known.hash == saved.hash;
  if (saved.sample.has_value() && staging::hash_sample(view) != *saved.sample) return false;
  *bytes_read += saved.record.data_bytes;
  return staging::hash_view(view) == saved.hash;
}

}  // namespace

Unchanged find_unchanged(const std::vector<TensorToWrite>& tensors, const LastSave& last, int num_threads) {
  Unchanged found;
  found.records.resize(tensors.size(), nullptr);
  std::atomic<size_t> next{0};
  std::atomic<int64_t> bytes_read{0};
  const auto compare = [&] {
    for (size_t t = next++; t < tensors.size(); t = next++) {
      const TensorToWrite& each = tensors[t];
      if (each.device != staging::kHost) continue;
      const SavedRecord* const saved = last.find(*each.fqn, *each.box, each.view.dtype);
      if (saved != nullptr && is_same(each.view, *saved, &bytes_read)) found.records[t] = saved;
    }
  };
  base::work_together("bcp-compare", static_cast<size_t>(std::max(num_threads, 1)), compare);
  found.bytes_read = bytes_read;
  return found;
}

std::vector<bool> files_to_link(const LastSave& last, const std::vector<const SavedRecord*>& records, LinkRule rule) {
  std::vector<int64_t> bytes_in_use(last.files.size(), 0);
  for (const SavedRecord* each : records) {
    if (each != nullptr) bytes_in_use[each->record.file] += each->record.bytes;
  }
  std::vector<bool> to_link(last.files.size(), false);
  for (size_t f = 0; f < last.files.size(); ++f) {
    const auto least = rule.least_in_use * static_cast<double>(last.files[f].entry.bytes - format::kHeaderBytes);
    to_link[f] = bytes_in_use[f] > 0 && static_cast<double>(bytes_in_use[f]) >= least &&
                 last.files[f].num_links < rule.most_links;
  }
  return to_link;
}

}  // namespace bytecheckpoint::engine
