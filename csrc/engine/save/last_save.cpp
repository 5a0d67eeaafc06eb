// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/save/last_save.h"

#include <algorithm>
#include <utility>

namespace bytecheckpoint::engine {

const SavedRecord* LastSave::find(const std::string& fqn, const tensor::Box& box, tensor::DType dtype) const {
  const auto found = records.find(fqn);
  if (found == records.end()) return nullptr;
  for (const SavedRecord& saved : found->second) {
    if (saved.box == box && saved.record.stored_dtype == dtype) return &saved;
  }
  return nullptr;
}

std::vector<std::pair<const SavedFile*, std::string>> LastSave::hashes_by_file() const {
  std::vector<std::vector<const SavedRecord*>> of_file(files.size());
  for (const auto& [fqn, saved] : records) {
    for (const SavedRecord& each : saved) of_file[each.record.file].push_back(&each);
  }
  std::vector<std::pair<const SavedFile*, std::string>> out;
  for (size_t f = 0; f < files.size(); ++f) {
    std::sort(of_file[f].begin(), of_file[f].end(),
              [](const SavedRecord* a, const SavedRecord* b) { return a->record.offset < b->record.offset; });
    if (of_file[f].size() != files[f].num_tensors) continue;
    std::string hashes;
    for (const SavedRecord* each : of_file[f]) base::encode_hash(each->hash, &hashes);
    out.emplace_back(&files[f], std::move(hashes));
  }
  return out;
}

LastSave last_save_of(const format::Manifest& manifest, const std::string& directory, uint32_t rank,
                      const std::unordered_map<std::string, StoredHashes>& hashes_by_name) {
  LastSave last;
  last.directory = directory;
  std::vector<const StoredHashes*> stored(manifest.files.size(), nullptr);
  std::vector<std::vector<std::pair<const format::Item*, const format::Chunk*>>> chunks(manifest.files.size());
  for (size_t f = 0; f < manifest.files.size(); ++f) {
    const auto found = hashes_by_name.find(manifest.files[f].name);
    if (manifest.files[f].id.rank == rank && found != hashes_by_name.end()) stored[f] = &found->second;
  }
  for (const format::Item& item : manifest.items) {
    for (const format::Chunk& chunk : item.chunks) {
      const bool is_hashed = chunk.record.kind == format::RecordKind::kTensor && stored[chunk.record.file] != nullptr;
      if (is_hashed) chunks[chunk.record.file].emplace_back(&item, &chunk);
    }
  }
  for (size_t f = 0; f < manifest.files.size(); ++f) {
    if (stored[f] == nullptr || stored[f]->hashes.size() != chunks[f].size() * base::kEncodedHashBytes) continue;
    std::sort(chunks[f].begin(), chunks[f].end(),
              [](const auto& a, const auto& b) { return a.second->record.offset < b.second->record.offset; });
    for (size_t i = 0; i < chunks[f].size(); ++i) {
      const auto& [item, chunk] = chunks[f][i];
      const std::string_view hash = std::string_view(stored[f]->hashes).substr(i * base::kEncodedHashBytes);
      SavedRecord saved{chunk->box, chunk->record, base::decode_hash(hash), std::nullopt};
      saved.record.file = static_cast<uint32_t>(last.files.size());
      last.records[item->fqn].push_back(std::move(saved));
    }
    last.files.push_back({manifest.files[f], stored[f]->num_links, chunks[f].size()});
  }
  return last;
}

}  // namespace bytecheckpoint::engine
