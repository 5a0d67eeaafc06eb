// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/export_file.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/base/bounded_queue.h"
#include "csrc/base/crc32.h"
#include "csrc/io/directory.h"
#include "csrc/io/file.h"
#include "csrc/io/writer.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

/// Slots that are filled by one run, so that the disk finds several requests at a time.
constexpr int kSlotsARun = 2;

class Exporter {
 public:
  Exporter(const ExportOptions& options, std::shared_ptr<const format::Manifest> checkpoint, const CheckpointView* view,
           std::string_view head, int64_t file_bytes)
      : options_(options),
        head_(head),
        file_bytes_(file_bytes),
        reader_(options.reading, std::move(checkpoint), view, options.convert) {}

  Status locate(const std::vector<TensorToExport>& tensors) {
    std::vector<TensorToRead> to_read;
    for (const TensorToExport& tensor : tensors) to_read.push_back({tensor.fqn, tensor.dtype});
    BCP_RETURN_IF_ERROR(reader_.locate(to_read));
    int64_t at = static_cast<int64_t>(head_.size());
    for (size_t t = 0; t < tensors.size(); ++t) {
      const int64_t offset = tensors[t].offset, itemsize = reader_.itemsize_bytes(t);
      if (offset != at || offset % itemsize != 0) {
        return Status::make(Code::kInvalidArgument, text("'", tensors[t].fqn, "': it begins at ", offset,
                                                         ", but what is before it ends at ", at));
      }
      offsets_.push_back(offset);
      at += reader_.numel(t) * itemsize;
    }
    offsets_.push_back(at);
    if (at == file_bytes_) return Status::ok();
    return Status::make(Code::kInvalidArgument, text("the tensors end at ", at, ", the file at ", file_bytes_));
  }

  base::Result<ExportedFile> write() {
    BCP_ASSIGN_OR_RETURN(io::File file, io::File::create(options_.path, options_.direct_io));
    BCP_RETURN_IF_ERROR(file.reserve(file_bytes_));
    BCP_ASSIGN_OR_RETURN(staging::BorrowedRing ring, staging::BorrowedRing::borrow(options_.ring_bytes));
    base::BoundedQueue<int> free_slots(static_cast<size_t>(ring->num_slots()));
    for (int slot = 0; slot < ring->num_slots(); ++slot) free_slots.push(slot);
    const io::WriterOptions writing{options_.num_io_threads, static_cast<size_t>(ring->num_slots())};
    io::Writer writer(writing, [&](int slot) { free_slots.push(slot); });
    ExportedFile out;
    Status outcome = fill_all(&file, &*ring, &free_slots, &writer, &out.crc);
    if (!outcome.is_ok()) writer.cancel();
    const Status written = writer.finish();
    if (outcome.is_ok() || outcome.code() == Code::kCancelled) outcome = written.is_ok() ? outcome : written;
    BCP_RETURN_IF_ERROR(outcome);
    BCP_RETURN_IF_ERROR(file.truncate(file_bytes_));
    BCP_RETURN_IF_ERROR(file.sync());
    BCP_RETURN_IF_ERROR(file.close());
    out.bytes = file_bytes_;
    return out;
  }

 private:
  Status fill_all(io::File* file, staging::SlotRing* ring, base::BoundedQueue<int>* free_slots, io::Writer* writer,
                  uint32_t* crc) {
    for (int64_t begin = 0; begin < file_bytes_;) {
      std::vector<io::WriteRequest> filled;
      for (int s = 0; s < kSlotsARun && begin < file_bytes_; ++s) {
        BCP_RETURN_IF_ERROR(writer->status());
        const std::optional<int> slot = free_slots->pop();
        if (!slot.has_value()) return Status::make(Code::kCancelled, "export stopped");
        const int64_t size = std::min(staging::kSlotBytes, file_bytes_ - begin);
        filled.push_back({file, ring->slot(*slot), size, begin, *slot});
        BCP_RETURN_IF_ERROR(want(begin, begin + size, ring->slot(*slot)));
        begin += size;
      }
      const auto cancelled = [&] { return !options_.progress(filled.front().offset); };
      BCP_RETURN_IF_ERROR(reader_.run(cancelled));
      for (io::WriteRequest& request : filled) {
        *crc = base::crc32(*crc, request.bytes, static_cast<size_t>(request.size));
        writer->submit(request);
      }
      if (!options_.progress(begin))
        return Status::make(Code::kCancelled, text("export(", options_.path, "): interrupted"));
    }
    return Status::ok();
  }

  /// Makes the next run fill `slot` with bytes [begin, end) of the file.
  Status want(int64_t begin, int64_t end, uint8_t* slot) {
    const auto head_bytes = static_cast<int64_t>(head_.size());
    if (begin < head_bytes) {
      const int64_t size = std::min(end, head_bytes) - begin;
      std::memcpy(slot, head_.data() + begin, static_cast<size_t>(size));
    }
    const auto after = std::upper_bound(offsets_.begin(), offsets_.end(), begin);
    for (size_t t = after == offsets_.begin() ? 0 : static_cast<size_t>(after - offsets_.begin()) - 1;
         t < reader_.num_tensors() && offsets_[t] < end; ++t) {
      const int64_t itemsize = reader_.itemsize_bytes(t);
      const int64_t first = (std::max(begin, offsets_[t]) - offsets_[t]) / itemsize;
      const int64_t last = (std::min(end, offsets_[t + 1]) - offsets_[t]) / itemsize;
      BCP_RETURN_IF_ERROR(reader_.want(t, first, last, slot + (offsets_[t] + first * itemsize - begin)));
    }
    return Status::ok();
  }

  const ExportOptions& options_;
  const std::string_view head_;
  const int64_t file_bytes_;
  ElementReader reader_;
  std::vector<int64_t> offsets_;  // of each tensor in the file, and the end of the last
};

}  // namespace

base::Result<ExportedFile> export_file(const ExportOptions& options, std::shared_ptr<const format::Manifest> checkpoint,
                                       const CheckpointView* view, std::string_view head,
                                       const std::vector<TensorToExport>& tensors, int64_t file_bytes) {
  Exporter exporter(options, std::move(checkpoint), view, head, file_bytes);
  BCP_RETURN_IF_ERROR(exporter.locate(tensors));
  return exporter.write();
}

base::Result<uint32_t> checksum_of_file(const std::string& directory, const std::string& name,
                                        const std::function<bool(int64_t)>& progress) {
  BCP_ASSIGN_OR_RETURN(io::File file, io::File::open(directory, name, /*direct=*/true));
  BCP_ASSIGN_OR_RETURN(const int64_t size, file.size());
  BCP_ASSIGN_OR_RETURN(staging::BorrowedRing ring, staging::BorrowedRing::borrow(2 * staging::kSlotBytes));
  uint32_t crc = 0;
  for (int64_t offset = 0; offset < size;) {
    const int64_t wanted = std::min(staging::kSlotBytes, size - offset);
    const int64_t aligned = base::align_up(wanted, io::kDirectAlignment);
    BCP_ASSIGN_OR_RETURN(const int64_t read, file.read_at(ring->slot(0), aligned, offset, wanted));
    crc = base::crc32(crc, ring->slot(0), static_cast<size_t>(std::min(read, wanted)));
    offset += wanted;
    if (!progress(offset)) return Status::make(Code::kCancelled, text("read(", file.path(), "): interrupted"));
  }
  return crc;
}

}  // namespace bytecheckpoint::engine
