// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/torch_file.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/bytes.h"
#include "csrc/base/crc32.h"
#include "csrc/format/archive/zip_layout.h"
#include "csrc/format/pickle/pickle_copy.h"
#include "csrc/format/torch/builtin_archive.h"
#include "csrc/format/torch/pickle_entry.h"
#include "csrc/format/torch/stored_tensor.h"
#include "csrc/format/torch/torch_archive.h"
#include "csrc/format/torch/torch_values.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;

// What torch.save wrote before it wrote archives begins with the pickle of this number.
constexpr std::string_view kLegacyMagic("\x80\x02\x8a\x0al\xfc\x9c\x46\xf9 j\xa8P\x19.", 15);
constexpr std::string_view kZipMagic("PK\x03\x04", 4);

// A tensor takes about 200 bytes in the pickle and 100 in the directory.
constexpr PickleLimits kLimits{256 << 20, 256 << 20};
/// Headers of storages that all lie in so many bytes are read together.
constexpr int64_t kHeadersTogether = 64 << 10;
/// What is behind a tensor in its storage is read up to so many bytes, to know the CRC of the tensor.
constexpr int64_t kMostBehind = 1 << 20;

/// A storage of the file, of which the pickle has tensors.
struct Storage {
  std::string_view key;
  const ZipEntry* entry = nullptr;
  int64_t offset = -1;  // of its content
  bool is_used = false;
  int64_t tensor_bytes = 0;  // of the longest row-major tensor that begins with it
};

class TorchFileReader {
 public:
  TorchFileReader(int64_t file_bytes, const ReadBytes& read) : read_(read), archive_(file_bytes, read) {}

  /// Returns the folder of all entries, once it has run.
  std::string folder() const { return std::string(entry_.folder); }

  base::Result<Manifest> run(std::string_view root) {
    BCP_RETURN_IF_ERROR(open());
    GlobalNames names;
    const PickleRules rules = names.rules();
    BCP_ASSIGN_OR_RETURN(const Pickle pickle, read_pickle(entry_.pickle, rules));
    if (pickle.end() != entry_.pickle.size()) return corrupt_archive("data.pkl: there are bytes after the pickle");
    TorchBudget budget(entry_.pickle.size());
    BCP_ASSIGN_OR_RETURN(std::vector<TorchValue> values, flatten_torch_value(pickle, names, &budget, root));
    BCP_RETURN_IF_ERROR(find_storages(values));
    BCP_RETURN_IF_ERROR(read_headers());
    BCP_RETURN_IF_ERROR(check_storages());
    manifest_.foreign.emplace();
    manifest_.files.emplace_back();
    BCP_RETURN_IF_ERROR(budget.take(values.size() * (sizeof(Item) + sizeof(Chunk))));
    PickleCopier copier(entry_.pickle, pickle, names);
    for (TorchValue& value : values) BCP_RETURN_IF_ERROR(add(&value, &copier, &budget));
    BCP_RETURN_IF_ERROR(add_crcs());
    keep_paths(values);
    return sorted();
  }

 private:
  /// Finds the pickle, or says why this file cannot be read.
  Status open() {
    BCP_ASSIGN_OR_RETURN(const std::string_view first,
                         archive_.view(0, std::min(kTorchMagicBytes, archive_.bytes()), "magic"));
    if (first.substr(0, kZipMagic.size()) != kZipMagic) {
      return Status::make(Code::kUnsupported,
                          "torch.save wrote it in its format from before torch 1.6, which can only be read whole: load "
                          "it with torch.load and save it again");
    }
    std::string why_not;
    BCP_ASSIGN_OR_RETURN(std::optional<PickleEntry> found, read_pickle_entry(&archive_, kLimits, &why_not));
    if (!found.has_value()) {
      return Status::make(Code::kUnsupported,
                          text("archive: ", why_not, ": load it with torch.load and save it again"));
    }
    entry_ = std::move(*found);
    BCP_ASSIGN_OR_RETURN(const ZipEntry* constants, entry_.find("constants.pkl"));
    if (constants == nullptr) return Status::ok();
    return Status::make(Code::kUnsupported,
                        "it is a TorchScript program: load it with torch.jit.load and save its state dict");
  }

  /// Lists the storages that tensors lie in, by their keys.
  Status find_storages(const std::vector<TorchValue>& values) {
    const std::string prefix = text(entry_.folder, "/data/");
    for (const ZipEntry& entry : entry_.directory.entries) {
      if (entry.name.substr(0, prefix.size()) == prefix)
        storages_.push_back({entry.name.substr(prefix.size()), &entry, -1, false});
    }
    const auto by_key = [](const Storage& a, const Storage& b) { return a.key < b.key; };
    std::sort(storages_.begin(), storages_.end(), by_key);
    const auto twice = std::adjacent_find(storages_.begin(), storages_.end(),
                                          [](const Storage& a, const Storage& b) { return a.key == b.key; });
    if (twice != storages_.end()) return corrupt_archive(text("there are two storages of the name '", twice->key, "'"));
    for (const TorchValue& value : values) {
      if (!value.tensor.has_value()) continue;
      Storage* storage = find(value.tensor->storage_key);
      if (storage == nullptr) {
        return corrupt_archive(
            text("there is no storage '", value.tensor->storage_key, "', which '", value.fqn, "' lies in"));
      }
      if (!storage->entry->is_plain) {
        return Status::make(Code::kUnsupported, text("archive: storage '", storage->key, "', which '", value.fqn,
                                                     "' lies in, is compressed or encrypted"));
      }
      storage->is_used = true;
    }
    return Status::ok();
  }

  Storage* find(std::string_view key) {
    const auto found = std::lower_bound(storages_.begin(), storages_.end(), key,
                                        [](const Storage& storage, std::string_view k) { return storage.key < k; });
    return found != storages_.end() && found->key == key ? &*found : nullptr;
  }

  /// Finds where the contents begin, by the headers before them. Headers that stand close together are read at once.
  Status read_headers() {
    for (Storage& storage : storages_) {
      if (storage.is_used) used_.push_back(&storage);
    }
    std::sort(used_.begin(), used_.end(),
              [](const Storage* a, const Storage* b) { return a->entry->header_offset < b->entry->header_offset; });
    for (size_t i = 0; i < used_.size();) {
      const int64_t begin = used_[i]->entry->header_offset;
      const int64_t most = std::min(begin + kHeadersTogether, entry_.directory.begin);
      size_t end = i;
      while (end < used_.size() && used_[end]->entry->header_offset <= most - zip::kLocalHeaderBytes) ++end;
      if (end == i) return corrupt_archive(text("there is no header of an entry at ", begin));
      const int64_t bytes = used_[end - 1]->entry->header_offset + zip::kLocalHeaderBytes - begin;
      BCP_ASSIGN_OR_RETURN(const std::string headers, read_(begin, bytes));
      for (; i < end; ++i) {
        const auto at = static_cast<size_t>(used_[i]->entry->header_offset - begin);
        BCP_ASSIGN_OR_RETURN(used_[i]->offset,
                             content_offset(*used_[i]->entry, entry_.directory, std::string_view(headers).substr(at)));
      }
    }
    return Status::ok();
  }

  /// Checks that no two storages overlap, and sorts them by their places.
  Status check_storages() {
    std::sort(used_.begin(), used_.end(), [](const Storage* a, const Storage* b) {
      return a->offset != b->offset ? a->offset < b->offset : a->entry->bytes < b->entry->bytes;
    });
    for (size_t i = 1; i < used_.size(); ++i) {
      if (used_[i]->offset - used_[i - 1]->offset >= used_[i - 1]->entry->bytes) continue;
      return corrupt_archive(
          text("storages '", used_[i - 1]->key, "' and '", used_[i]->key, "' overlap at byte ", used_[i]->offset));
    }
    return Status::ok();
  }

  Status add(TorchValue* value, PickleCopier* copier, TorchBudget* budget) {
    Item& item = manifest_.items.emplace_back();
    item.fqn = value->fqn;
    item.ordinal = static_cast<uint32_t>(manifest_.items.size() - 1);
    item.chunks.emplace_back();
    if (value->tensor.has_value()) return place(value, &item);
    if (value->refusal.empty()) {
      base::Result<std::string> pickle = copier->copy(value->value, budget->left());
      if (pickle.is_ok()) {
        Record& record = item.chunks.front().record;
        set_text(RecordKind::kInline, pickle.value(), &*manifest_.foreign, &record);
        record.offset = entry_.pickle_offset;
        record.bytes = archive_bytes_of_pickle(record.data_bytes);
        return budget->take(pickle.value().size());
      }
      value->refusal = pickle.status().message();
    }
    return refuse(value->refusal, &item, budget);
  }

  Status refuse(const std::string& reason, Item* item, TorchBudget* budget) {
    const std::string sentence = text("'", item->fqn, "' cannot be read without torch.load: ", reason);
    set_text(RecordKind::kRefused, sentence, &*manifest_.foreign, &item->chunks.front().record);
    return budget->take(sentence.size());
  }

  Status place(TorchValue* value, Item* item) {
    item->is_tensor = true;
    item->tensor.requires_grad = value->tensor->requires_grad;
    Storage& storage = *find(value->tensor->storage_key);
    const auto placed = place_tensor(std::move(*value->tensor), *storage.entry, storage.offset);
    if (!placed.is_ok()) return placed.status().with_context(text("'", item->fqn, "'"));
    item->tensor.dtype = placed.value().dtype;
    Chunk& chunk = item->chunks.front();
    if (value->box.has_value()) {
      item->tensor.sizes = std::move(value->global_sizes);
      chunk.box = std::move(*value->box);
    } else {
      item->tensor.sizes = placed.value().sizes;
      chunk.box = tensor::whole(item->tensor.sizes);
    }
    set_stored_tensor(placed.value(), item->fqn, &*manifest_.foreign, &chunk.record);
    if (chunk.record.kind == RecordKind::kTensor && chunk.record.data_offset == storage.offset) {
      storage.tensor_bytes = std::max(storage.tensor_bytes, chunk.record.data_bytes);
    }
    return Status::ok();
  }

  /// Notes the CRCs of the storages. FSDP pads the shards of uneven tensors: of a tensor with a little behind it in its
  /// storage, the CRC follows from those of the storage and of what is behind.
  Status add_crcs() {
    if (!entry_.has_crcs) return Status::ok();
    for (const Storage* storage : used_) {
      const int64_t bytes = storage->entry->bytes, behind = bytes - storage->tensor_bytes;
      manifest_.foreign->crcs.push_back({0, storage->offset, bytes, storage->entry->crc});
      if (behind == 0 || behind > std::min(storage->tensor_bytes, kMostBehind)) continue;
      BCP_ASSIGN_OR_RETURN(const std::string rest, read_(storage->offset + storage->tensor_bytes, behind));
      const uint32_t crc = base::crc32_without_end(storage->entry->crc, base::crc32(0, rest.data(), rest.size()),
                                                   static_cast<uint64_t>(behind));
      manifest_.foreign->crcs.push_back({0, storage->offset, storage->tensor_bytes, crc});
    }
    return Status::ok();
  }

  void keep_paths(const std::vector<TorchValue>& values) {
    base::ByteWriter out;
    encode_container(Tree::Kind::kDict, 2 * values.size(), &out);
    for (const TorchValue& value : values) {
      encode_text(Tree::Kind::kString, value.fqn, &out);
      out.raw(value.path);
    }
    manifest_.planner_data = Tree::from_encoded(out.take());
  }

  base::Result<Manifest> sorted() {
    std::vector<Item>& items = manifest_.items;
    std::sort(items.begin(), items.end(),
              [](const Item& a, const Item& b) { return a.fqn != b.fqn ? a.fqn < b.fqn : a.ordinal < b.ordinal; });
    const auto twice =
        std::adjacent_find(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.fqn == b.fqn; });
    if (twice == items.end()) return std::move(manifest_);
    return Status::make(Code::kUnsupported, text("'", twice->fqn, "': two values of the nested dicts get this name"));
  }

  const ReadBytes& read_;
  ArchiveReader archive_;
  PickleEntry entry_;
  std::vector<Storage> storages_;  // by key
  std::vector<Storage*> used_;     // by place
  Manifest manifest_;
};

}  // namespace

bool has_torch_magic(std::string_view first) {
  return first.substr(0, kZipMagic.size()) == kZipMagic || first.substr(0, kLegacyMagic.size()) == kLegacyMagic;
}

base::Result<Manifest> read_torch_file(int64_t file_bytes, const ReadBytes& read, std::string_view root,
                                       std::string* folder) {
  TorchFileReader reader(file_bytes, read);
  base::Result<Manifest> manifest = reader.run(root);
  if (folder != nullptr) *folder = reader.folder();
  return manifest;
}

}  // namespace bytecheckpoint::format
