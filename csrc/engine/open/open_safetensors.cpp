// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/open_safetensors.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "csrc/base/mutex.h"
#include "csrc/base/named_thread.h"
#include "csrc/engine/open/model_files.h"
#include "csrc/engine/open/planned_files.h"
#include "csrc/format/safetensors/safetensors.h"
#include "csrc/io/file.h"
#include "csrc/io/file_system.h"
#include "csrc/io/object_store.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr ModelNames kSafetensorsNames{
    "safetensors", "", ".safetensors", ".safetensors.index.json", "model.safetensors", "model.safetensors.index.json"};
/// Most headers are shorter than this, and need one request.
constexpr int64_t kFirstReadBytes = 256 << 10;
constexpr size_t kHeaderThreads = 8;

/// \param entry  Has the name of the file, and receives its version.
base::Result<format::SafetensorsHeader> read_header(const std::string& directory, bool has_lasting_inodes,
                                                    format::FileEntry* entry) {
  BCP_ASSIGN_OR_RETURN(io::File file, io::File::open(directory, entry->name, /*direct=*/false));
  BCP_ASSIGN_OR_RETURN(entry->version, version_to_note(file, has_lasting_inodes));
  BCP_ASSIGN_OR_RETURN(const int64_t size, file.size());
  BCP_ASSIGN_OR_RETURN(std::string first, file.read(0, std::min(size, kFirstReadBytes)));
  const auto length = format::safetensors_header_bytes(first.substr(0, format::kSafetensorsPrefixBytes), size);
  if (!length.is_ok()) return length.status().at(0, format::kSafetensorsPrefixBytes).in_file(file.path());
  const int64_t end = format::kSafetensorsPrefixBytes + length.value();
  const auto read = static_cast<int64_t>(first.size());
  if (end > read) {
    BCP_ASSIGN_OR_RETURN(const std::string rest, file.read(read, end - read));
    first += rest;
  }
  const auto behind_prefix = static_cast<size_t>(format::kSafetensorsPrefixBytes);
  auto header = format::read_safetensors_header(
      std::string_view(first).substr(behind_prefix, static_cast<size_t>(length.value())), size);
  return header.is_ok() ? std::move(header) : header.status().in_file(file.path());
}

base::Result<std::vector<format::SafetensorsHeader>> read_headers(const std::string& directory,
                                                                  std::vector<format::FileEntry>* files) {
  std::vector<format::SafetensorsHeader> headers(files->size());
  const bool has_lasting_inodes = !io::is_url(directory) && io::has_lasting_inodes(directory);
  std::atomic<size_t> next{0};
  base::Mutex mutex;
  Status failure;
  base::work_together("bcp-headers", std::min(kHeaderThreads, headers.size()), [&] {
    for (size_t i = next++; i < headers.size(); i = next++) {
      auto header = read_header(directory, has_lasting_inodes, &(*files)[i]);
      if (header.is_ok()) {
        headers[i] = std::move(header.value());
        continue;
      }
      const base::MutexLock lock(mutex);
      if (failure.is_ok()) failure = header.status();
      next = headers.size();
    }
  });
  BCP_RETURN_IF_ERROR(failure);
  return headers;
}

format::Item item_of(format::SafetensorsTensor tensor, uint32_t file) {
  format::Item item;
  item.fqn = std::move(tensor.name);
  item.is_tensor = true;
  item.tensor.dtype = tensor.dtype;
  item.tensor.sizes = tensor.sizes;
  format::Chunk chunk;
  chunk.box = tensor::whole(tensor.sizes);
  chunk.record.kind = format::RecordKind::kTensor;
  chunk.record.stored_dtype = tensor.dtype;
  chunk.record.file = file;
  chunk.record.offset = chunk.record.data_offset = tensor.offset;
  chunk.record.bytes = chunk.record.data_bytes = tensor.bytes;
  item.chunks.push_back(std::move(chunk));
  return item;
}

}  // namespace

base::Result<format::Manifest> open_safetensors(const std::string& path) {
  BCP_ASSIGN_OR_RETURN(const ModelFiles files, find_model_files(path, kSafetensorsNames));
  format::Manifest manifest;
  for (const std::string& name : files.stored) manifest.files.emplace_back().name = name;
  auto read = read_headers(files.directory, &manifest.files);
  if (!read.is_ok()) return file_failure(files, read.status());
  manifest.foreign.emplace().format = "safetensors";
  if (files.directory != path) manifest.foreign->directory = files.directory;
  for (uint32_t file = 0; file < files.stored.size(); ++file) {
    format::SafetensorsHeader& header = read.value()[file];
    if (manifest.user_metadata.empty()) manifest.user_metadata = std::move(header.metadata);
    for (format::SafetensorsTensor& tensor : header.tensors) {
      manifest.items.push_back(item_of(std::move(tensor), file));
      manifest.items.back().ordinal = static_cast<uint32_t>(manifest.items.size() - 1);
    }
  }
  BCP_RETURN_IF_ERROR(join_items(files, &manifest));
  return manifest;
}

}  // namespace bytecheckpoint::engine
