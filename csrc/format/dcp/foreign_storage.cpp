// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/dcp/foreign_storage.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "csrc/format/archive/zip_directory.h"
#include "csrc/format/pickle/standard_globals.h"
#include "csrc/format/torch/pickled_tensor.h"
#include "csrc/format/torch/stored_tensor.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;
using Kind = PickleValue::Kind;

/// One entry of the storage data.
struct Place {
  size_t item = 0;
  bool has_offset = false;
  tensor::Dims offset;
  size_t order = 0;  // position in the dict
  int64_t index = -1;
  PickleValue info;

  bool operator<(const Place& other) const {
    return std::tie(item, has_offset, offset, order) <
           std::tie(other.item, other.has_offset, other.offset, other.order);
  }
};
using Places = std::vector<Place>::const_iterator;

/// Memory that a file takes, beside its name: in a vector that grows, and in a map.
constexpr size_t kFileBytes = kTimesToGrow * sizeof(FileEntry) + 64;

/// Says why a file of this name could lie outside the directory; nullptr if it cannot.
const char* fault_of_name(std::string_view name) {
  if (name.empty()) return "is empty";
  if (name.find('\0') != name.npos) return "holds a NUL";
  if (name[0] == '/') return "is absolute";
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('/', begin), name.size());
    if (name.substr(begin, end - begin) == "..") return "leads out of the checkpoint";
    begin = end + 1;
  }
  return nullptr;
}

class StorageData {
 public:
  /// What is done with the value that belongs to a chunk.
  using Use = Status (StorageData::*)(const PickleValue& value, const Item& item, Chunk* chunk);

  StorageData(DcpPickle* pickle, Manifest* manifest, Use use) : pickle_(*pickle), manifest_(*manifest), use_(use) {}

  Status read(const PickleSpan& entries) {
    BCP_RETURN_IF_ERROR(pickle_.budget()->take(entries.size() / 2 * sizeof(Place)));
    places_.reserve(entries.size() / 2);
    size_t order = 0;
    for (auto entry = entries.begin(); entry != entries.end(); ++entry, ++order) {
      const PickleValue key = *entry;
      ++entry;
      BCP_RETURN_IF_ERROR(read_place(key, *entry, order).with_context(text("storage data, entry ", order)));
    }
    // Sorted by item and offset, for the binary search below; equal places in the order of the dict.
    std::sort(places_.begin(), places_.end());
    for (Places first = places_.begin(); first != places_.end();) {
      const Places last = std::find_if(first, places_.cend(), [&](const Place& p) { return p.item != first->item; });
      Item& item = manifest_.items[first->item];
      BCP_RETURN_IF_ERROR(place_item(first, last, &item).with_context(text("'", item.fqn, "'")));
      first = last;
    }
    return Status::ok();
  }

  Status read_record(const PickleValue& info, const Item& item, Chunk* chunk) {
    Record* const record = &chunk->record;
    if (!pickle_.values().object(info, Kind::kObject, kStorageInfo).has_value()) {
      return Status::make(Code::kUnsupported, "the storage data are not a _StorageInfo");
    }
    BCP_ASSIGN_OR_RETURN(const Attributes attributes, pickle_.instance(info, kStorageInfo, "_StorageInfo"));
    const PickleValue path = attributes.find("relative_path"), offset = attributes.find("offset"),
                      length = attributes.find("length"), transforms = attributes.find("transform_descriptors");
    if (!path.is(Kind::kString)) return Status::make(Code::kCorrupt, "the file name is not a str");
    const std::string_view name = pickle_.values().text(path);
    BCP_RETURN_IF_ERROR(pickle_.budget()->take(name.size()));
    const char* fault = fault_of_name(name);
    if (fault != nullptr) return Status::make(Code::kCorrupt, text("file name '", name, "' ", fault));
    // Newer DCP writes an empty sequence where older DCP writes None.
    const bool none = transforms.is(Kind::kHole) || transforms.is(Kind::kNone);
    if (!none && (!is_sequence(transforms) || pickle_.values().children(transforms).size() != 0)) {
      return Status::make(Code::kUnsupported, text("record in '", name, "': it was transformed by stream extensions",
                                                   names_of(transforms)));
    }
    const bool are_ints = offset.is(Kind::kInt) && length.is(Kind::kInt);
    const int64_t begin = are_ints ? pickle_.values().integer(offset) : -1;
    const int64_t bytes = are_ints ? pickle_.values().integer(length) : -1;
    int64_t end;
    if (!base::checked_add(begin, bytes, &end)) {
      return Status::make(Code::kCorrupt, text("record in '", name, "': impossible offset or length"));
    }
    record->kind = item.is_tensor ? RecordKind::kForeign : RecordKind::kBytes;
    record->offset = begin;
    record->bytes = bytes;
    return find_file(name, &record->file);
  }

  Status read_header(const PickleValue& header, const Item& item, Chunk* chunk) {
    if (header.is(Kind::kNone) || chunk->record.kind != RecordKind::kForeign) return Status::ok();
    if (!header.is(Kind::kBytes)) return Status::make(Code::kCorrupt, "the header of a tensor is not bytes");
    const std::string_view bytes = pickle_.values().text(header);
    // Reading it takes up to 12 times its size, and any number of chunks may name one header.
    BCP_RETURN_IF_ERROR(pickle_.budget()->take(12 * bytes.size()));
    static constexpr uint32_t kOther = ~uint32_t{0};
    const PickleRules rules{[](std::string_view module, std::string_view name) {
                              return std::make_optional(find_standard_global(module, name).value_or(kOther));
                            },
                            true};
    auto read = read_pickle(bytes, rules);
    if (!read.is_ok()) return read.status().with_context("header of a tensor");
    std::optional<PickledTensor> pickled = read_pickled_tensor(read.value(), read.value().root());
    ForeignMeta& foreign = *manifest_.foreign;
    if (!pickled.has_value()) {
      const std::string sentence =
          text("'", item.fqn, "' cannot be read: it is no plain tensor (quantized, sparse or of a subclass)");
      BCP_RETURN_IF_ERROR(pickle_.budget()->take(kTimesToGrow * sentence.size()));
      set_text(RecordKind::kRefused, sentence, &foreign, &chunk->record);
      return Status::ok();
    }
    ZipEntry whole;
    whole.bytes = chunk->record.bytes;
    BCP_ASSIGN_OR_RETURN(const ArchivedTensor stored, place_tensor(std::move(*pickled), whole, chunk->record.offset));
    if (stored.sizes != chunk->box.sizes || stored.dtype != item.tensor.dtype) {
      return Status::make(Code::kCorrupt,
                          text("the header of a chunk of ", tensor::to_text(chunk->box.sizes), " says ",
                               tensor::to_text(stored.sizes), " of ", tensor::find_dtype(stored.dtype)->name));
    }
    BCP_RETURN_IF_ERROR(pickle_.budget()->take(kTimesToGrow * (sizeof(tensor::Dims) + item.fqn.size())));
    set_stored_tensor(stored, item.fqn, &foreign, &chunk->record);
    return Status::ok();
  }

 private:
  Status read_place(const PickleValue& key, const PickleValue& info, size_t order) {
    if (!pickle_.values().object(key, Kind::kObject, kMetadataIndex).has_value()) {
      return Status::make(Code::kUnsupported, "the key is not a MetadataIndex");
    }
    BCP_ASSIGN_OR_RETURN(const Attributes attributes, pickle_.instance(key, kMetadataIndex, "MetadataIndex"));
    const PickleValue fqn = attributes.find("fqn");
    if (!fqn.is(Kind::kString)) return Status::make(Code::kCorrupt, "the name is not a str");
    const std::string_view name = pickle_.values().text(fqn);
    BCP_RETURN_IF_ERROR(pickle_.budget()->take(name.size()));
    const Item* item = manifest_.find(name);
    if (item == nullptr) return Status::ok();
    Place place;
    place.item = static_cast<size_t>(item - manifest_.items.data());
    place.order = order;
    place.info = info;
    const PickleValue offset = attributes.find("offset"), index = attributes.find("index");
    place.has_offset = !offset.is(Kind::kHole) && !offset.is(Kind::kNone);
    if (place.has_offset) BCP_RETURN_IF_ERROR(pickle_.read_dims(offset, "offset", &place.offset));
    if (index.is(Kind::kInt)) place.index = pickle_.values().integer(index);
    places_.push_back(std::move(place));
    return Status::ok();
  }

  Status place_item(Places first, Places last, Item* item) {
    const Places with_offset = std::find_if(first, last, [](const Place& p) { return p.has_offset; });
    BCP_RETURN_IF_ERROR(pickle_.budget()->take(item->chunks.size() * sizeof(PickleValue)));
    std::vector<PickleValue> infos(item->chunks.size());
    for (Places place = first; place != with_offset; ++place) {
      const auto chunk = infos.size() == 1 ? size_t{0} : static_cast<size_t>(place->index);
      if (chunk < infos.size()) infos[chunk] = place->info;
    }
    if (item->is_tensor) {
      for (size_t c = 0; c < infos.size(); ++c) {
        const tensor::Dims& begin = item->chunks[c].box.offsets;
        const Places behind = std::upper_bound(with_offset, last, begin,
                                               [](const tensor::Dims& o, const Place& p) { return o < p.offset; });
        if (behind != with_offset && std::prev(behind)->offset == begin) infos[c] = std::prev(behind)->info;
      }
    }
    for (size_t c = 0; c < infos.size(); ++c) {
      if (!infos[c].is(Kind::kHole)) BCP_RETURN_IF_ERROR((this->*use_)(infos[c], *item, &item->chunks[c]));
    }
    return Status::ok();
  }

  /// Returns ` (a, b)` for the message. Only the first few names, and only the begin of each, because a small pickle
  /// can share one long text among many places.
  std::string names_of(const PickleValue& transforms) const {
    std::string names;
    if (!is_sequence(transforms)) return names;
    for (const PickleValue& value : pickle_.values().children(transforms)) {
      if (value.is(Kind::kString))
        names += text(names.empty() ? "" : ", ", pickle_.values().text(value).substr(0, 100));
      if (names.size() > 300) break;
    }
    return names.empty() ? names : text(" (", names, ")");
  }

  static bool is_sequence(const PickleValue& value) { return value.is(Kind::kList) || value.is(Kind::kTuple); }

  Status find_file(std::string_view name, uint32_t* index) {
    const auto [found, is_new] = files_.emplace(name, static_cast<uint32_t>(manifest_.files.size()));
    *index = found->second;
    if (!is_new) return Status::ok();
    BCP_RETURN_IF_ERROR(pickle_.budget()->take(kFileBytes + name.size() + 1));
    manifest_.files.emplace_back().name = std::string(name);
    return Status::ok();
  }

  DcpPickle& pickle_;
  Manifest& manifest_;
  const Use use_;
  std::vector<Place> places_;
  // An ordered map, because chosen names could make hashing slow.
  std::map<std::string_view, uint32_t> files_;
};

}  // namespace

Status read_storage_data(const PickleValue& storage_data, DcpPickle* pickle, Manifest* manifest) {
  if (storage_data.is(Kind::kHole) || storage_data.is(Kind::kNone)) return Status::ok();
  if (!storage_data.is(Kind::kDict)) return Status::make(Code::kUnsupported, "storage data: not a dict");
  return StorageData(pickle, manifest, &StorageData::read_record).read(pickle->values().children(storage_data));
}

Status read_tensor_headers(const PickleValue& headers, DcpPickle* pickle, Manifest* manifest) {
  if (!headers.is(Kind::kDict)) return Status::make(Code::kUnsupported, "headers of tensors: not a dict");
  return StorageData(pickle, manifest, &StorageData::read_header).read(pickle->values().children(headers));
}

}  // namespace bytecheckpoint::format
