// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/dcp/foreign_metadata.h"

#include <algorithm>
#include <string>
#include <utility>

#include "csrc/format/dcp/dcp_pickle.h"
#include "csrc/format/dcp/foreign_storage.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;
using Kind = PickleValue::Kind;

/// An entry of `state_dict_metadata`, and its position there.
struct NamedEntry {
  std::string_view fqn;
  PickleValue value;
  uint32_t ordinal;
};

Status corrupt_metadata(std::string message) {
  return Status::make(Code::kCorrupt, std::move(message));
}

Tree text_tree(std::string_view text) {
  base::ByteWriter out;
  encode_text(Tree::Kind::kString, text, &out);
  return Tree::from_encoded(out.take());
}

class Metadata {
 public:
  Metadata(DcpPickle* pickle, Manifest* manifest) : pickle_(*pickle), manifest_(*manifest) {}

  Status read() {
    const PickleValue& root = pickle_.values().root();
    const bool is_theirs = pickle_.values().object(root, Kind::kObject, kMetadataOfByteCheckpoint).has_value();
    if (is_theirs) return read_of_byte_checkpoint(root).with_context(kOfByteCheckpoint);
    BCP_ASSIGN_OR_RETURN(const Attributes attributes, pickle_.instance(root, kMetadata, "Metadata"));
    manifest_.foreign.emplace();
    BCP_RETURN_IF_ERROR(read_items(attributes.find("state_dict_metadata")));
    BCP_RETURN_IF_ERROR(read_storage_data(attributes.find("storage_data"), &pickle_, &manifest_));
    BCP_RETURN_IF_ERROR(read_tree(attributes.find("planner_data"), "planner data", &manifest_.planner_data));
    BCP_RETURN_IF_ERROR(read_storage_meta(attributes.find("storage_meta")).with_context("storage meta"));
    Tree& version = manifest_.foreign->version;
    BCP_RETURN_IF_ERROR(read_tree(attributes.find("version"), "version", &version));
    const bool sane = version.kind() == Tree::Kind::kNone || version.kind() == Tree::Kind::kString;
    return sane ? Status::ok() : corrupt_metadata("version: neither None nor a str");
  }

 private:
  /// ByteCheckpoint's data files hold bare elements, and its metadata a pickle of each tensor that describes them.
  Status read_of_byte_checkpoint(const PickleValue& root) {
    BCP_ASSIGN_OR_RETURN(const Attributes attributes, pickle_.instance(root, kMetadataOfByteCheckpoint, "Metadata"));
    manifest_.foreign.emplace();
    manifest_.foreign->is_of_byte_checkpoint = true;
    BCP_RETURN_IF_ERROR(read_items(attributes.find("state_dict_metadata")));
    BCP_RETURN_IF_ERROR(read_storage_data(attributes.find("storage_data"), &pickle_, &manifest_));
    BCP_RETURN_IF_ERROR(read_tensor_headers(attributes.find("all_tensor_metadata"), &pickle_, &manifest_));
    for (const Item& item : manifest_.items) {
      const bool has_all = std::none_of(item.chunks.begin(), item.chunks.end(),
                                        [](const Chunk& chunk) { return chunk.record.kind == RecordKind::kForeign; });
      if (!has_all) return corrupt_metadata(text("'", item.fqn, "': a chunk has no header"));
    }
    return read_tree(attributes.find("planner_data"), "planner data", &manifest_.planner_data);
  }

  Status read_items(const PickleValue& state_dict) {
    if (!state_dict.is(Kind::kDict)) return corrupt_metadata("metadata of the state dict: not a dict");
    const PickleSpan children = pickle_.values().children(state_dict);
    const size_t num_items = children.size() / 2;
    BCP_RETURN_IF_ERROR(pickle_.budget()->take(num_items * (sizeof(NamedEntry) + sizeof(Item))));
    std::vector<NamedEntry> entries;
    entries.reserve(num_items);
    for (auto child = children.begin(); child != children.end(); ++child) {
      const auto ordinal = static_cast<uint32_t>(entries.size());
      if (!(*child).is(Kind::kString)) return corrupt_metadata(text("key ", ordinal, " of the state dict: not a str"));
      const std::string_view fqn = pickle_.values().text(*child);
      BCP_RETURN_IF_ERROR(pickle_.budget()->take(fqn.size() + 1));
      ++child;
      entries.push_back({fqn, *child, ordinal});
    }
    std::sort(entries.begin(), entries.end(), [](const NamedEntry& a, const NamedEntry& b) { return a.fqn < b.fqn; });
    manifest_.items.reserve(entries.size());
    for (const NamedEntry& entry : entries) {
      const std::string_view fqn = entry.fqn;
      if (!manifest_.items.empty() && manifest_.items.back().fqn == fqn)
        return corrupt_metadata(text("'", fqn, "': the state dict has this key twice"));
      Item& item = manifest_.items.emplace_back();
      item.fqn = std::string(fqn);
      item.ordinal = entry.ordinal;
      BCP_RETURN_IF_ERROR(read_item(entry.value, &item).with_context(text("'", fqn, "'")));
    }
    return Status::ok();
  }

  Status read_item(const PickleValue& value, Item* item) {
    Record absent;
    absent.kind = RecordKind::kAbsent;
    if (pickle_.values().object(value, Kind::kObject, kBytesStorageMetadata).has_value()) {
      BCP_RETURN_IF_ERROR(pickle_.budget()->take(sizeof(Chunk)));
      item->chunks.push_back({{}, absent});
      return Status::ok();
    }
    BCP_ASSIGN_OR_RETURN(
        const Attributes attributes,
        pickle_.instance(value, kTensorStorageMetadata, "TensorStorageMetadata or BytesStorageMetadata"));
    item->is_tensor = true;
    BCP_RETURN_IF_ERROR(read_properties(attributes.find("properties"), &item->tensor));
    BCP_RETURN_IF_ERROR(pickle_.read_dims(attributes.find("size"), "shape", &item->tensor.sizes));
    int64_t numel;
    if (!tensor::checked_numel(item->tensor.sizes, &numel)) {
      return corrupt_metadata(text("impossible shape ", tensor::to_text(item->tensor.sizes)));
    }
    const PickleValue list = attributes.find("chunks");
    if (!list.is(Kind::kList) && !list.is(Kind::kTuple)) return corrupt_metadata("the chunks are not a list");
    const PickleSpan chunks = pickle_.values().children(list);
    BCP_RETURN_IF_ERROR(pickle_.budget()->take(chunks.size() * sizeof(Chunk)));
    item->chunks.reserve(chunks.size());
    for (const PickleValue& chunk : chunks) {
      item->chunks.push_back({{}, absent});
      BCP_RETURN_IF_ERROR(read_box(chunk, item->tensor.sizes, &item->chunks.back().box));
    }
    return Status::ok();
  }

  Status read_box(const PickleValue& value, const tensor::Dims& shape, tensor::Box* box) {
    BCP_ASSIGN_OR_RETURN(const Attributes attributes,
                         pickle_.instance(value, kChunkStorageMetadata, "ChunkStorageMetadata"));
    BCP_RETURN_IF_ERROR(pickle_.read_dims(attributes.find("offsets"), "offsets of a chunk", &box->offsets));
    BCP_RETURN_IF_ERROR(pickle_.read_dims(attributes.find("sizes"), "sizes of a chunk", &box->sizes));
    if (tensor::is_inside(*box, shape)) return Status::ok();
    return corrupt_metadata(text("chunk at ", tensor::to_text(box->offsets), " of ", tensor::to_text(box->sizes),
                                 " outside shape ", tensor::to_text(shape)));
  }

  /// The state of a TensorProperties is a tuple: dtype, layout, requires_grad, memory format, pin_memory. torch 2.15
  /// adds strides, on which nothing depends.
  Status read_properties(const PickleValue& value, tensor::TensorInfo* info) {
    const std::optional<PickleObject> properties = pickle_.values().object(value, Kind::kObject, kTensorProperties);
    if (!properties.has_value()) return corrupt_metadata("the properties are not a TensorProperties");
    const PickleSpan state = pickle_.values().children(properties->state);
    if (!properties->state.is(Kind::kTuple) || state.size() < 5)
      return corrupt_metadata("the properties have fewer than five values");
    const tensor::DTypeInfo* dtype = state[0].is(Kind::kGlobal) ? dtype_of_global(state[0].global()) : nullptr;
    if (dtype == nullptr) return corrupt_metadata("the properties have no dtype");
    info->dtype = dtype->dtype;
    const PickleValue layout = argument_of(state[1], kGetLayout);
    if (!layout.is(Kind::kString)) return corrupt_metadata("the properties have no layout");
    const std::string_view name = pickle_.values().text(layout);
    if (name != "torch.strided") {
      return Status::make(Code::kUnsupported, text("layout ", name, ": only torch.strided can be read"));
    }
    const PickleValue format = argument_of(state[3], kMemoryFormatEncoding);
    const int64_t code = format.is(Kind::kInt) ? pickle_.values().integer(format) : -1;
    if (code < 0 || code > 2) return corrupt_metadata("the properties have no memory format");
    info->memory_format = static_cast<uint8_t>(code);
    if (!state[2].is(Kind::kBool) || !state[4].is(Kind::kBool))
      return corrupt_metadata("a flag of the properties is not a bool");
    info->requires_grad = state[2].is_true();
    info->pin_memory = state[4].is_true();
    return Status::ok();
  }

  /// Returns the argument if `value` is a call of `global` with one argument, else a hole.
  PickleValue argument_of(const PickleValue& value, DcpGlobal global) const {
    const std::optional<PickleObject> call = pickle_.values().object(value, Kind::kCall, global);
    if (!call.has_value()) return {};
    const PickleSpan args = pickle_.values().children(call->args);
    return args.size() == 1 ? args[0] : PickleValue();
  }

  Status read_tree(const PickleValue& value, std::string_view what, Tree* out) {
    if (value.is(Kind::kHole)) return Status::ok();
    auto tree = unfold_tree(pickle_.values(), value, pickle_.budget());
    if (!tree.is_ok()) return tree.status().with_context(what);
    *out = std::move(tree.value());
    return Status::ok();
  }

  /// Reads a StorageMeta as a dict of its attributes, with paths as strings.
  Status read_storage_meta(const PickleValue& value) {
    if (value.is(Kind::kHole) || value.is(Kind::kNone)) return Status::ok();
    BCP_ASSIGN_OR_RETURN(const Attributes attributes, pickle_.instance(value, kStorageMeta, "StorageMeta"));
    ForeignMeta& meta = *manifest_.foreign;
    const PickleSpan dict = attributes.dict();
    base::ByteWriter out;
    encode_container(Tree::Kind::kDict, dict.size(), &out);
    for (auto at = dict.begin(); at != dict.end(); ++at) {
      if (!(*at).is(Kind::kString)) return corrupt_metadata("the name of an attribute is not a str");
      const std::string_view name = pickle_.values().text(*at);
      Tree key, content;
      BCP_RETURN_IF_ERROR(read_tree(*at, "name", &key));
      ++at;
      std::string path;
      BCP_ASSIGN_OR_RETURN(const bool is_path, pickle_.try_read_path(*at, &path));
      if (is_path) {
        content = text_tree(path);
      } else {
        BCP_RETURN_IF_ERROR(read_tree(*at, name, &content));
      }
      if (name == "checkpoint_id") {
        meta.checkpoint_id_is_path = is_path;
        manifest_.checkpoint_id = TreeReader(content).next().text;
      }
      BCP_RETURN_IF_ERROR(pickle_.budget()->take(kTimesToGrow * (key.bytes().size() + content.bytes().size())));
      out.raw(key.bytes());
      out.raw(content.bytes());
    }
    meta.storage_meta = Tree::from_encoded(out.take());
    return Status::ok();
  }

  DcpPickle& pickle_;
  Manifest& manifest_;
};

}  // namespace

base::Result<Manifest> read_foreign_metadata(std::string_view pickle) {
  auto read = DcpPickle::read(pickle);
  if (!read.is_ok()) return read.status().with_context("metadata");
  Manifest manifest;
  BCP_RETURN_IF_ERROR(Metadata(&read.value(), &manifest).read().with_context("metadata"));
  return manifest;
}

}  // namespace bytecheckpoint::format
