// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/assemble.h"

#include <algorithm>
#include <string>
#include <unordered_map>

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

struct Written {
  const format::WrittenRecord* record;
  uint32_t file;
};

std::string key_of(const std::string& fqn, const tensor::Dims& offsets) {
  std::string key = fqn;
  key.push_back('\0');
  key.append(reinterpret_cast<const char*>(offsets.data()), 8 * offsets.size());
  return key;
}

Status fill_chunk(const format::Item& item, const std::unordered_map<std::string, Written>& written,
                  format::Chunk* chunk) {
  const auto found = written.find(key_of(item.fqn, chunk->box.offsets));
  if (found == written.end()) {
    return Status::make(Code::kInvalidArgument, text("'", item.fqn, "' chunk at ", tensor::to_text(chunk->box.offsets),
                                                     ": planned, but written by no rank"));
  }
  const format::WrittenRecord& record = *found->second.record;
  const bool is_bytes = record.record.kind == format::RecordKind::kBytes;
  if (is_bytes == item.is_tensor || !(record.box == chunk->box)) {
    return Status::make(
        Code::kInvalidArgument,
        text("'", item.fqn, "' chunk at ", tensor::to_text(chunk->box.offsets), ": planned as ",
             item.is_tensor ? "a tensor" : "bytes", " of ", tensor::to_text(chunk->box.sizes), ", written as ",
             is_bytes ? "bytes" : "a tensor", " of ", tensor::to_text(record.box.sizes)));
  }
  chunk->record = record.record;
  chunk->record.file = found->second.file;
  return Status::ok();
}

}  // namespace

base::Result<format::Manifest> assemble_manifest(format::Manifest manifest,
                                                 const std::vector<format::WriteResult>& results) {
  std::unordered_map<std::string, Written> written;
  for (const format::WriteResult& result : results) {
    const auto first_file = static_cast<uint32_t>(manifest.files.size());
    manifest.files.insert(manifest.files.end(), result.files.begin(), result.files.end());
    for (const format::WrittenRecord& record : result.records) {
      written[key_of(record.fqn, record.box.offsets)] = {&record, first_file + record.record.file};
    }
  }
  for (format::Item& item : manifest.items) {
    if (item.is_tensor && tensor::find_dtype(item.tensor.dtype) == nullptr) {
      return Status::make(Code::kInvalidArgument, text("'", item.fqn, "': unknown dtype"));
    }
    if (item.tensor.sizes.size() > format::kMaxDims) {
      return Status::make(Code::kInvalidArgument, text("'", item.fqn, "': ", item.tensor.sizes.size(),
                                                       " dims, the format has at most ", format::kMaxDims));
    }
    for (format::Chunk& chunk : item.chunks) {
      if (!tensor::is_inside(chunk.box, item.tensor.sizes)) {
        return Status::make(Code::kInvalidArgument,
                            text("'", item.fqn, "' chunk at ", tensor::to_text(chunk.box.offsets), " of ",
                                 tensor::to_text(chunk.box.sizes), ": outside its tensor of shape ",
                                 tensor::to_text(item.tensor.sizes)));
      }
      BCP_RETURN_IF_ERROR(fill_chunk(item, written, &chunk));
    }
  }
  // std::string compares as unsigned bytes: the order of UTF-8.
  std::sort(manifest.items.begin(), manifest.items.end(),
            [](const format::Item& a, const format::Item& b) { return a.fqn < b.fqn; });
  const auto twice = std::adjacent_find(manifest.items.begin(), manifest.items.end(),
                                        [](const format::Item& a, const format::Item& b) { return a.fqn == b.fqn; });
  if (twice != manifest.items.end()) {
    return Status::make(Code::kInvalidArgument, text("'", twice->fqn, "': planned twice"));
  }
  return manifest;
}

}  // namespace bytecheckpoint::engine
