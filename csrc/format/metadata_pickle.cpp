// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "csrc/format/metadata_file.h"
#include "csrc/format/pickle_writer.h"

// The objects of torch.distributed.checkpoint.metadata, as its pickles build them: a dataclass is an empty instance
// (NEWOBJ) and its attributes (BUILD). No object is shared between tensors but immutable ones, because users mutate.

namespace bytecheckpoint::format {
namespace {

constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";

void begin_dataclass(PickleWriter* out, std::string_view module, std::string_view name) {
  out->global(module, name);
  out->empty_tuple();
  out->new_object();
}

void begin_attributes(PickleWriter* out) {
  out->empty_dict();
  out->mark();
}

void end_attributes(PickleWriter* out) {
  out->set_items();
  out->build();
}

void torch_size(PickleWriter* out, const tensor::Dims& sizes) {
  out->global("torch", "Size");
  out->int_tuple(sizes);
  out->tuple1();
  out->reduce();
}

/// `torch.strided`; a singleton once unpickled.
void strided_layout(PickleWriter* out) {
  if (out->recall("layout")) return;
  out->global("torch.serialization", "_get_layout");
  out->string("torch.strided");
  out->tuple1();
  out->reduce();
  out->memoise("layout");
}

void memory_format(PickleWriter* out, uint8_t encoding) {
  const std::string key = base::text("memory_format:", static_cast<int>(encoding));
  if (out->recall(key)) return;
  out->global(kMetadataModule, "_MEM_FORMAT_ENCODING");
  out->integer(encoding);
  out->tuple1();
  out->reduce();
  out->memoise(key);
}

void tensor_properties(PickleWriter* out, const TensorInfo& info) {
  begin_dataclass(out, kMetadataModule, "TensorProperties");
  out->mark();
  out->global("torch", tensor::find_dtype(info.dtype)->name);
  strided_layout(out);
  out->boolean(info.requires_grad);
  memory_format(out, info.memory_format);
  out->boolean(info.pin_memory);
  out->tuple_from_mark();
  out->build();
}

void tensor_entry(PickleWriter* out, const Item& item) {
  begin_dataclass(out, kMetadataModule, "TensorStorageMetadata");
  begin_attributes(out);
  out->string("properties");
  tensor_properties(out, item.tensor);
  out->string("size");
  torch_size(out, item.tensor.sizes);
  out->string("chunks");
  out->empty_list();
  out->mark();
  for (const Chunk& chunk : item.chunks) {
    begin_dataclass(out, kMetadataModule, "ChunkStorageMetadata");
    begin_attributes(out);
    out->string("offsets");
    torch_size(out, chunk.box.offsets);
    out->string("sizes");
    torch_size(out, chunk.box.sizes);
    end_attributes(out);
  }
  out->append_items();
  end_attributes(out);
}

void metadata_index(PickleWriter* out, const Item& item, size_t chunk) {
  begin_dataclass(out, kMetadataModule, "MetadataIndex");
  begin_attributes(out);
  out->string("fqn");
  out->string(item.fqn);
  out->string("index");
  if (item.is_tensor) {
    out->integer(static_cast<int64_t>(chunk));
    out->string("offset");
    torch_size(out, item.chunks[chunk].box.offsets);
  } else {
    out->none();
  }
  end_attributes(out);
}

void storage_info(PickleWriter* out, const std::string& file_name, const Record& record) {
  begin_dataclass(out, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
  begin_attributes(out);
  out->string("relative_path");
  out->string(file_name);
  out->string("offset");
  out->integer(record.offset);
  out->string("length");
  out->integer(record.bytes);
  end_attributes(out);
}

void storage_meta(PickleWriter* out, const Manifest& manifest) {
  begin_dataclass(out, kMetadataModule, "StorageMeta");
  begin_attributes(out);
  out->string("checkpoint_id");
  out->global("pathlib", "PosixPath");  // never pathlib._local, which only Python 3.13 has
  out->string(manifest.checkpoint_id);
  out->tuple1();
  out->reduce();
  out->string("save_id");
  out->string(base::text(kSaveIdPrefix, base::to_hex(manifest.save_id)));
  out->string("load_id");
  out->none();
  out->string("modules");
  out->empty_list();
  end_attributes(out);
}

}  // namespace

std::string metadata_pickle(const Manifest& manifest) {
  // The dicts keep the order of the state dict, as DCP's do; the manifest is sorted by name.
  std::vector<const Item*> items;
  items.reserve(manifest.items.size());
  for (const Item& item : manifest.items) items.push_back(&item);
  std::sort(items.begin(), items.end(), [](const Item* a, const Item* b) { return a->ordinal < b->ordinal; });

  PickleWriter out(4);
  begin_dataclass(&out, kMetadataModule, "Metadata");
  begin_attributes(&out);
  out.string("state_dict_metadata");
  out.empty_dict();
  out.mark();
  for (const Item* item : items) {
    out.string(item->fqn);
    if (item->is_tensor) {
      tensor_entry(&out, *item);
    } else {
      begin_dataclass(&out, kMetadataModule, "BytesStorageMetadata");
    }
  }
  out.set_items();
  out.string("planner_data");
  out.tree(manifest.planner_data);
  out.string("storage_data");
  out.empty_dict();
  out.mark();
  for (const Item* item : items) {
    for (size_t c = 0; c < item->chunks.size(); ++c) {
      metadata_index(&out, *item, c);
      storage_info(&out, manifest.files[item->chunks[c].record.file].name, item->chunks[c].record);
    }
  }
  out.set_items();
  out.string("storage_meta");
  storage_meta(&out, manifest);
  out.string("version");
  out.string("1.0.0");
  end_attributes(&out);
  return out.finish();
}

}  // namespace bytecheckpoint::format
