// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "csrc/format/manifest/metadata_file.h"
#include "csrc/format/pickle/dcp_globals.h"
#include "csrc/format/pickle/pickle_writer.h"

// Writes the objects of torch.distributed.checkpoint.metadata as Python pickles them: a dataclass is an empty instance
// (NEWOBJ) and its attributes (BUILD). Tensors share only immutable objects, because users may change the others.

namespace bytecheckpoint::format {
namespace {

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

void begin_torch_size(PickleWriter* out) {
  out->global("torch", "Size");
}

void end_torch_size(PickleWriter* out) {
  out->tuple1();
  out->reduce();
}

/// Writes `torch.strided`, which is one object once unpickled.
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

void tensor_properties(PickleWriter* out, const tensor::TensorInfo& info) {
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

/// Opcodes that are the same in many items or chunks, kept once the first one was written. Pickles have millions of
/// them.
struct CommonOpcodes {
  std::map<uint32_t, std::string> tensor;  // of TensorStorageMetadata, by the properties
  std::string tensor_chunks, tensor_end;
  std::string chunk, chunk_sizes, chunk_end;                // of ChunkStorageMetadata
  std::string index, index_index, index_offset, index_end;  // of MetadataIndex
  std::string info, info_offset, info_length;               // of _StorageInfo
  std::vector<std::string> file_names;                      // one of each file
};

void chunk_entry(PickleWriter* out, const Chunk& chunk, CommonOpcodes* phrases) {
  out->repeat(&phrases->chunk, [&] {
    begin_dataclass(out, kMetadataModule, "ChunkStorageMetadata");
    begin_attributes(out);
    out->string("offsets");
    begin_torch_size(out);
  });
  out->int_tuple(chunk.box.offsets);
  out->repeat(&phrases->chunk_sizes, [&] {
    end_torch_size(out);
    out->string("sizes");
    begin_torch_size(out);
  });
  out->int_tuple(chunk.box.sizes);
  out->repeat(&phrases->chunk_end, [&] {
    end_torch_size(out);
    end_attributes(out);
  });
}

void tensor_entry(PickleWriter* out, const Item& item, CommonOpcodes* phrases) {
  const tensor::TensorInfo& info = item.tensor;
  const uint32_t properties = static_cast<uint32_t>(info.dtype) | uint32_t{info.memory_format} << 8 |
                              (info.requires_grad ? 1u << 16 : 0) | (info.pin_memory ? 1u << 17 : 0);
  out->repeat(&phrases->tensor[properties], [&] {
    begin_dataclass(out, kMetadataModule, "TensorStorageMetadata");
    begin_attributes(out);
    out->string("properties");
    tensor_properties(out, info);
    out->string("size");
    begin_torch_size(out);
  });
  out->int_tuple(info.sizes);
  out->repeat(&phrases->tensor_chunks, [&] {
    end_torch_size(out);
    out->string("chunks");
    out->empty_list();
    out->mark();
  });
  for (const Chunk& chunk : item.chunks) chunk_entry(out, chunk, phrases);
  out->repeat(&phrases->tensor_end, [&] {
    out->append_items();
    end_attributes(out);
  });
}

/// \param fqn  The number of the item's name in the memo.
void metadata_index(PickleWriter* out, const Item& item, size_t chunk, uint32_t fqn, CommonOpcodes* phrases) {
  out->repeat(&phrases->index, [&] {
    begin_dataclass(out, kMetadataModule, "MetadataIndex");
    begin_attributes(out);
    out->string("fqn");
  });
  out->get(fqn);
  out->repeat(&phrases->index_index, [&] { out->string("index"); });
  if (!item.is_tensor) {
    out->none();
    end_attributes(out);
    return;
  }
  out->integer(static_cast<int64_t>(chunk));
  out->repeat(&phrases->index_offset, [&] {
    out->string("offset");
    begin_torch_size(out);
  });
  out->int_tuple(item.chunks[chunk].box.offsets);
  out->repeat(&phrases->index_end, [&] {
    end_torch_size(out);
    end_attributes(out);
  });
}

void storage_info(PickleWriter* out, const Manifest& manifest, const Record& record, CommonOpcodes* phrases) {
  out->repeat(&phrases->info, [&] {
    begin_dataclass(out, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
    begin_attributes(out);
    out->string("relative_path");
  });
  out->repeat(&phrases->file_names[record.file], [&] { out->string(manifest.files[record.file].name); });
  out->repeat(&phrases->info_offset, [&] { out->string("offset"); });
  out->integer(record.offset);
  out->repeat(&phrases->info_length, [&] { out->string("length"); });
  out->integer(record.bytes);
  end_attributes(out);
}

void storage_meta(PickleWriter* out, const Manifest& manifest, std::string_view id_prefix) {
  begin_dataclass(out, kMetadataModule, "StorageMeta");
  begin_attributes(out);
  out->string("checkpoint_id");
  out->global("pathlib", "PosixPath");  // not pathlib._local, which only Python 3.13 has
  out->string(manifest.checkpoint_id);
  out->tuple1();
  out->reduce();
  out->string("save_id");
  out->string(base::text(id_prefix, base::to_hex(manifest.save_id)));
  out->string("load_id");
  out->none();
  out->string("modules");
  out->empty_list();
  end_attributes(out);
}

/// Returns a number of bytes that the pickle does not exceed. Looks at no chunk: the chunks of one item differ only in
/// the bytes of their integers.
size_t most_bytes_of(const Manifest& manifest) {
  constexpr size_t kFixedBytes = 4096, kNameBytes = 16, kItemBytes = 256, kChunkBytes = 160;
  // For each value of a tree the pickle has at most one byte more, for the memo or the length of an int.
  const size_t tree_bytes = manifest.planner_data.bytes().size();
  size_t bytes = kFixedBytes + manifest.checkpoint_id.size() + tree_bytes + tree_bytes / 5;
  for (const FileEntry& file : manifest.files) bytes += kNameBytes + file.name.size();
  for (const Item& item : manifest.items) {
    // No offset or size of a chunk is larger than the size of the tensor.
    const auto dims_bytes = static_cast<size_t>(PickleWriter::int_tuple_bytes(item.tensor.sizes));
    bytes += kItemBytes + item.fqn.size() + dims_bytes + item.chunks.size() * (kChunkBytes + 3 * dims_bytes);
  }
  return bytes;
}

}  // namespace

std::string metadata_pickle(const Manifest& manifest, size_t spare_bytes, std::string_view id_prefix) {
  // The dicts are in the order of the state dict, like DCP's; the manifest is sorted by name.
  std::vector<std::pair<uint32_t, const Item*>> by_ordinal;
  by_ordinal.reserve(manifest.items.size());
  for (const Item& item : manifest.items) by_ordinal.emplace_back(item.ordinal, &item);
  std::sort(by_ordinal.begin(), by_ordinal.end());

  PickleWriter out(4);
  out.reserve(most_bytes_of(manifest) + spare_bytes);
  CommonOpcodes phrases;
  phrases.file_names.resize(manifest.files.size());
  begin_dataclass(&out, kMetadataModule, "Metadata");
  begin_attributes(&out);
  out.string("state_dict_metadata");
  out.empty_dict();
  out.mark();
  std::vector<uint32_t> names;
  names.reserve(by_ordinal.size());
  for (const auto& [ordinal, item] : by_ordinal) {
    names.push_back(out.string(item->fqn));
    if (item->is_tensor) {
      tensor_entry(&out, *item, &phrases);
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
  for (size_t i = 0; i < by_ordinal.size(); ++i) {
    const Item& item = *by_ordinal[i].second;
    for (size_t c = 0; c < item.chunks.size(); ++c) {
      metadata_index(&out, item, c, names[i], &phrases);
      storage_info(&out, manifest, item.chunks[c].record, &phrases);
    }
  }
  out.set_items();
  out.string("storage_meta");
  storage_meta(&out, manifest, id_prefix);
  out.string("version");
  out.string("1.0.0");
  end_attributes(&out);
  return out.finish();
}

}  // namespace bytecheckpoint::format
