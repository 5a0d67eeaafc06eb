// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/tensor_place.h"

#include <algorithm>
#include <atomic>
#include <numeric>

#include "csrc/base/mutex.h"
#include "csrc/base/named_thread.h"
#include "csrc/engine/load/dequantization.h"
#include "csrc/engine/open/planned_files.h"
#include "csrc/format/torch/torch_archive.h"
#include "csrc/io/directory.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr size_t kThreads = 4;
/// Archives that one thread takes at a time. They are neighbours in a file, which it then opens once.
constexpr size_t kBatch = 64;

/// Whether a tensor of these strides has no gaps and shares no elements: in some order of its dims it is row-major.
bool is_dense(const tensor::Dims& sizes, const tensor::Dims& strides) {
  std::vector<uint32_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0u);
  // Dims of one element may have any stride. They come first, and are skipped below.
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return sizes[a] != 1 && sizes[b] != 1 ? strides[a] > strides[b] : sizes[a] == 1 && sizes[b] != 1;
  });
  int64_t wanted = 1;
  for (size_t d = order.size(); d-- > 0;) {
    if (sizes[order[d]] == 1) continue;
    if (strides[order[d]] != wanted) return false;
    wanted *= sizes[order[d]];
  }
  return true;
}

/// Whether elements of these strides are in row-major order.
bool is_row_major(const tensor::Dims& sizes, const tensor::Dims& strides) {
  const tensor::Dims wanted = tensor::row_major_strides(sizes);
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] > 1 && strides[d] != wanted[d]) return false;
  }
  return true;
}

/// Changes the place of a whole record to that of a chunk of a view.
Status apply_view(const RecordView& view, const tensor::Dims& sizes, TensorPlace* place) {
  if (view.quantized != nullptr) return place_codes(view, sizes, place);
  planner::ViewedBox viewed{tensor::whole(sizes), 0, view.offset, view.strides};
  if (!is_row_major(view.record_sizes, place->strides) &&
      !planner::restride(view.record_sizes, place->strides, &viewed)) {
    return Status::make(Code::kUnsupported,
                        text("a transform joins dims of a record of ", tensor::to_text(view.record_sizes),
                             " whose elements are not stored in row-major order"));
  }
  int64_t numel = 0, record_numel = 0;
  const bool is_all = tensor::checked_numel(sizes, &numel) && tensor::checked_numel(view.record_sizes, &record_numel) &&
                      numel == record_numel;
  place->fills_stretch = place->fills_stretch && is_all;
  place->data_offset += viewed.offset * tensor::find_dtype(place->dtype)->itemsize_bytes;
  place->strides = std::move(viewed.strides);
  return Status::ok();
}

/// Finds the stretch with a checksum that a record is in.
void find_stretch(const format::Manifest& manifest, const format::Record& record, TensorPlace* place) {
  if (!manifest.foreign.has_value()) return;
  const std::vector<format::StoredCrc>& crcs = manifest.foreign->crcs;
  const auto behind = std::upper_bound(
      crcs.begin(), crcs.end(), std::make_pair(record.file, record.data_offset),
      [](const auto& wanted, const format::StoredCrc& crc) { return wanted < std::make_pair(crc.file, crc.offset); });
  for (auto crc = behind; crc != crcs.begin();) {
    --crc;
    if (crc->file != record.file || (place->stretch.has_value() && crc->offset != place->stretch->offset)) return;
    const bool begins_there = crc->offset == record.data_offset;
    if (begins_there && crc->bytes == record.bytes) place->fills_stretch = true;
    if (place->fills_stretch || crc->offset + crc->bytes >= record.data_offset + record.bytes) place->stretch = *crc;
    if (place->fills_stretch || !place->stretch.has_value()) return;
  }
}

/// Returns the place of a chunk whose record says it all.
base::Result<std::optional<TensorPlace>> place_by_manifest(const std::string& directory,
                                                           const format::Manifest& manifest,
                                                           const ChunkInRecord& wanted) {
  const format::Record& record = wanted.chunk->record;
  const tensor::Dims& sizes = wanted.view == nullptr ? wanted.chunk->box.sizes : wanted.view->record_sizes;
  TensorPlace place = place_of(*wanted.chunk);
  place.strides = record.kind == format::RecordKind::kStrided
                      ? manifest.foreign->strides[static_cast<size_t>(record.data_bytes)]
                      : tensor::row_major_strides(sizes);
  find_stretch(manifest, record, &place);
  place.fills_stretch = place.fills_stretch && is_dense(sizes, place.strides);
  if (wanted.view != nullptr) {
    Status fault = apply_view(*wanted.view, wanted.chunk->box.sizes, &place);
    if (!fault.is_ok()) {
      return std::move(fault)
          .at(record.offset, record.bytes)
          .in_file(io::join(directory, manifest.files[record.file].name));
    }
  }
  return std::make_optional(std::move(place));
}

std::optional<TensorPlace> place_in_archive(const format::ArchivedTensor& stored, const ChunkInRecord& wanted) {
  const format::Chunk& chunk = *wanted.chunk;
  const tensor::Dims& sizes = wanted.view == nullptr ? chunk.box.sizes : wanted.view->record_sizes;
  if (stored.is_conj || stored.is_neg || stored.sizes != sizes) return std::nullopt;
  const tensor::DTypeInfo* info = tensor::find_plain_dtype(stored.dtype);
  if (info == nullptr) return std::nullopt;
  TensorPlace place;
  place.dtype = stored.dtype;
  place.data_offset = chunk.record.offset + stored.data_offset;
  int64_t numel = 0;
  if (!tensor::checked_numel(stored.sizes, &numel)) return std::nullopt;
  place.strides = stored.strides;
  if (numel == 0) return place;
  if (!is_dense(stored.sizes, stored.strides)) return std::nullopt;
  if (!stored.storage_crc.has_value()) return place;
  place.stretch = {chunk.record.file, chunk.record.offset + stored.storage_offset, stored.storage_bytes,
                   *stored.storage_crc};
  place.fills_stretch =
      stored.data_offset == stored.storage_offset && stored.storage_bytes == numel * info->itemsize_bytes;
  return place;
}

/// Opens archives of one checkpoint; one object for each thread.
class Locator {
 public:
  Locator(const std::string& directory, const format::Manifest& manifest)
      : directory_(directory), manifest_(manifest) {}

  base::Result<std::optional<TensorPlace>> locate(const ChunkInRecord& wanted) {
    const format::Record& record = wanted.chunk->record;
    if (!file_.is_open() || open_ != record.file) {
      BCP_ASSIGN_OR_RETURN(file_, open_planned(directory_, manifest_.files[record.file], /*direct=*/false));
      open_ = record.file;
    }
    const auto read = [&](int64_t offset, int64_t size) { return file_.read(record.offset + offset, size); };
    base::Result<std::optional<format::ArchivedTensor>> stored = format::read_tensor_archive(record.bytes, read);
    if (!stored.is_ok()) {
      const Status fault = stored.status();
      if (!fault.path().empty()) return fault;  // the file's own error
      return Status::make(fault.code(), text("read(", file_.path(), ", offset=", record.offset, "): ", fault.message()),
                          file_.path());
    }
    std::optional<TensorPlace> place;
    if (stored.value().has_value()) place = place_in_archive(*stored.value(), wanted);
    if (wanted.view == nullptr) return place;
    Status fault = place.has_value() ? apply_view(*wanted.view, wanted.chunk->box.sizes, &*place)
                                     : Status::make(Code::kUnsupported,
                                                    "a transform needs a record of plain elements; this one is "
                                                    "quantized, of a subclass, or has gaps");
    if (!fault.is_ok()) return std::move(fault).at(record.offset, record.bytes).in_file(file_.path());
    return place;
  }

 private:
  const std::string& directory_;
  const format::Manifest& manifest_;
  io::File file_;
  uint32_t open_ = 0;
};

}  // namespace

TensorPlace place_of(const format::Chunk& chunk) {
  const format::Record& record = chunk.record;
  return {record.stored_dtype, record.data_offset, tensor::row_major_strides(chunk.box.sizes), {}, false, {}};
}

Status check_extents(const std::string& directory, const format::Manifest& manifest,
                     const std::vector<const format::Chunk*>& chunks) {
  std::vector<int64_t> sizes(manifest.files.size(), -1);
  for (const format::Chunk* chunk : chunks) {
    const format::Record& record = chunk->record;
    if (record.kind == format::RecordKind::kAbsent) {
      return Status::make(Code::kCorrupt,
                          text("load(", directory, "): the metadata name a chunk at ",
                               tensor::to_text(chunk->box.offsets), " but do not say where it is stored"),
                          directory);
    }
    const std::string& name = manifest.files[record.file].name;
    const std::string path = io::join(directory, name);
    if (record.kind == format::RecordKind::kInline) continue;
    if (record.kind == format::RecordKind::kRefused) {
      return Status::make(Code::kUnsupported, text("read(", path, "): ", manifest.foreign->text_of(record)), path);
    }
    int64_t& size = sizes[record.file];
    if (size < 0) {
      BCP_ASSIGN_OR_RETURN(const io::File file, open_planned(directory, manifest.files[record.file], /*direct=*/false));
      BCP_ASSIGN_OR_RETURN(size, file.size());
    }
    if (record.bytes > size || record.offset > size - record.bytes) {
      return Status::make(Code::kCorrupt,
                          text("read(", path, ", offset=", record.offset, ", ", record.bytes,
                               " bytes): the metadata name a record there, but the file has only ", size, " bytes"),
                          path);
    }
  }
  return Status::ok();
}

base::Result<std::vector<std::optional<TensorPlace>>> locate_tensors(const std::string& directory,
                                                                     const format::Manifest& manifest,
                                                                     const std::vector<ChunkInRecord>& chunks) {
  std::vector<std::optional<TensorPlace>> places(chunks.size());
  std::vector<size_t> foreign;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const format::Record& record = chunks[i].chunk->record;
    if (record.kind == format::RecordKind::kTensor || record.kind == format::RecordKind::kStrided) {
      BCP_ASSIGN_OR_RETURN(places[i], place_by_manifest(directory, manifest, chunks[i]));
    } else if (record.kind == format::RecordKind::kForeign || chunks[i].view != nullptr) {
      foreign.push_back(i);
    }
  }
  std::sort(foreign.begin(), foreign.end(), [&](size_t a, size_t b) {
    const format::Record &x = chunks[a].chunk->record, &y = chunks[b].chunk->record;
    return x.file != y.file ? x.file < y.file : x.offset < y.offset;
  });
  std::atomic<size_t> next{0};
  base::Mutex mutex;
  Status failure;
  const auto work = [&] {
    Locator locator(directory, manifest);
    for (size_t begin = next.fetch_add(kBatch); begin < foreign.size(); begin = next.fetch_add(kBatch)) {
      for (size_t i = begin; i < std::min(begin + kBatch, foreign.size()); ++i) {
        auto place = locator.locate(chunks[foreign[i]]);
        if (place.is_ok()) {
          places[foreign[i]] = std::move(place.value());
          continue;
        }
        base::MutexLock lock(mutex);
        if (failure.is_ok()) failure = place.status();
        next = foreign.size();
        return;
      }
    }
  };
  base::work_together("bcp-locate", std::min(kThreads, (foreign.size() + kBatch - 1) / kBatch), work);
  BCP_RETURN_IF_ERROR(failure);
  BCP_RETURN_IF_ERROR(locate_scales(directory, manifest, chunks, &places));
  return places;
}

}  // namespace bytecheckpoint::engine
