// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest/manifest_encoder.h"

namespace bytecheckpoint::format {
namespace {

void append(const tensor::Dims& dims, base::ByteWriter* out) {
  out->raw(dims.data(), 8 * dims.size());
}

}  // namespace

ManifestEncoder::ManifestEncoder(const Manifest& manifest) : manifest_(manifest) {
  head_.save_id = manifest.save_id;
  uint64_t num_dims = 0, num_chunks = 0;
  for (const Item& item : manifest.items) {
    if (item.is_partial) head_.version = kPartialItemsVersion;
    names_bytes_ += item.fqn.size();
    num_chunks += item.chunks.size();
    num_dims += item.tensor.sizes.size();
    for (const Chunk& chunk : item.chunks) num_dims += chunk.box.offsets.size() + chunk.box.sizes.size();
  }
  head_.sections[kStrings].bytes = names_bytes_;
  for (const FileEntry& file : manifest.files) head_.sections[kStrings].bytes += file.name.size();
  head_.sections[kItems].bytes = kRowBytes * manifest.items.size();
  head_.sections[kDims].bytes = 8 * num_dims;
  head_.sections[kChunks].bytes = kRowBytes * num_chunks;
  head_.sections[kFiles].bytes = kRowBytes * manifest.files.size();
  head_.sections[kPlannerData].bytes = manifest.planner_data.bytes().size();
  head_.sections[kUserMetadata].bytes = manifest.user_metadata.size();
  head_.sections[kCheckpointId].bytes = manifest.checkpoint_id.size();
  num_bytes_ = kManifestHeadBytes;
  for (ManifestHead::Range& section : head_.sections) {
    section.offset = (num_bytes_ + 7) / 8 * 8;
    num_bytes_ = section.offset + section.bytes;
  }
}

void ManifestEncoder::append_to(std::string* bytes) const {
  const size_t begin = bytes->size();
  base::ByteWriter out(std::move(*bytes));
  out.reserve(begin + num_bytes_);
  out.raw(encode_manifest_head(head_));
  const auto start = [&](Section section) { out.zeros(begin + head_.sections[section].offset - out.size()); };
  start(kStrings);
  append_strings(&out);
  start(kItems);
  append_items(&out);
  start(kDims);
  append_dims(&out);
  start(kChunks);
  append_chunks(&out);
  start(kFiles);
  append_files(&out);
  start(kPlannerData);
  out.raw(manifest_.planner_data.bytes());
  start(kUserMetadata);
  out.raw(manifest_.user_metadata);
  start(kCheckpointId);
  out.raw(manifest_.checkpoint_id);
  *bytes = out.take();
}

void ManifestEncoder::append_strings(base::ByteWriter* out) const {
  for (const Item& item : manifest_.items) out->raw(item.fqn);
  for (const FileEntry& file : manifest_.files) out->raw(file.name);
}

void ManifestEncoder::append_items(base::ByteWriter* out) const {
  uint64_t name_offset = 0, next_dim = 0, next_chunk = 0;
  for (const Item& item : manifest_.items) {
    const ItemRow row = pack_item(item, name_offset, next_dim, next_chunk);
    out->raw(&row, sizeof row);
    name_offset += item.fqn.size();
    next_chunk += item.chunks.size();
    next_dim += item.tensor.sizes.size();
    for (const Chunk& chunk : item.chunks) next_dim += chunk.box.offsets.size() + chunk.box.sizes.size();
  }
}

void ManifestEncoder::append_dims(base::ByteWriter* out) const {
  for (const Item& item : manifest_.items) {
    append(item.tensor.sizes, out);
    for (const Chunk& chunk : item.chunks) {
      append(chunk.box.offsets, out);
      append(chunk.box.sizes, out);
    }
  }
}

void ManifestEncoder::append_chunks(base::ByteWriter* out) const {
  uint64_t next_dim = 0;
  for (const Item& item : manifest_.items) {
    next_dim += item.tensor.sizes.size();
    for (const Chunk& chunk : item.chunks) {
      const ChunkRow row = pack_chunk(chunk, next_dim);
      out->raw(&row, sizeof row);
      next_dim += chunk.box.offsets.size() + chunk.box.sizes.size();
    }
  }
}

void ManifestEncoder::append_files(base::ByteWriter* out) const {
  uint64_t name_offset = names_bytes_;
  for (const FileEntry& file : manifest_.files) {
    const FileRow row = pack_file(file, name_offset);
    out->raw(&row, sizeof row);
    name_offset += file.name.size();
  }
}

std::string encode_manifest(const Manifest& manifest) {
  std::string out;
  ManifestEncoder(manifest).append_to(&out);
  return out;
}

}  // namespace bytecheckpoint::format
