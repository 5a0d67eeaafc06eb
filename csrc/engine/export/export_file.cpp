// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/export/export_file.h"

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

class Exporter {
 public:
  Exporter(const ExportOptions& options, std::shared_ptr<const format::Manifest> checkpoint, const CheckpointView* view,
           const FileFrame& frame)
      : options_(options),
        frame_(frame),
        file_bytes_(frame.file_bytes),
        reader_(options.reading, std::move(checkpoint), view, options.convert, options.computed) {
    if (options.checksums != nullptr) reader_.follow(options.checksums);
  }

  Status locate(const std::vector<TensorToRead>& tensors) {
    BCP_RETURN_IF_ERROR(reader_.locate(tensors));
    if (frame_.offsets.size() != tensors.size()) {
      return Status::make(Code::kInvalidArgument,
                          text(tensors.size(), " tensors at ", frame_.offsets.size(), " places"));
    }
    int64_t at = 0;
    for (size_t t = 0; t < tensors.size(); ++t) {
      const int64_t offset = frame_.offsets[t], itemsize = reader_.itemsize_bytes(t);
      if (offset < at || offset % itemsize != 0) {
        return Status::make(Code::kInvalidArgument, text("'", tensors[t].fqn, "': it begins at ", offset,
                                                         ", but what is before it ends at ", at));
      }
      at = offset + reader_.numel(t) * itemsize;
      ends_.push_back(at);
    }
    crcs_.assign(tensors.size(), 0);
    if (at <= file_bytes_) return Status::ok();
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
      for (int s = 0; s < staging::kSlotsARun && begin < file_bytes_; ++s) {
        BCP_RETURN_IF_ERROR(writer->status());
        const std::optional<int> slot = free_slots->pop();
        if (!slot.has_value()) return Status::make(Code::kCancelled, "export stopped");
        const int64_t size = std::min(staging::kSlotBytes, file_bytes_ - begin);
        const auto* const bytes = reinterpret_cast<const char*>(ring->slot(*slot));
        filled.push_back({file, {{bytes, static_cast<size_t>(size)}}, size, begin, *slot});
        BCP_RETURN_IF_ERROR(want(begin, begin + size, ring->slot(*slot)));
        begin += size;
      }
      const auto cancelled = [&] { return !options_.progress(filled.front().offset); };
      BCP_RETURN_IF_ERROR(reader_.run(cancelled));
      for (io::WriteRequest& request : filled) {
        uint8_t* const bytes = ring->slot(request.slot);
        BCP_RETURN_IF_ERROR(complete(request.offset, request.offset + request.size, bytes));
        if (options_.needs_crc) *crc = base::crc32(*crc, bytes, static_cast<size_t>(request.size));
        writer->submit(std::move(request));
      }
      if (!options_.progress(begin))
        return Status::make(Code::kCancelled, text("export(", options_.path, "): interrupted"));
    }
    return Status::ok();
  }

  /// Makes the next run fill in the tensors in `slot`, which is for bytes [begin, end) of the file.
  Status want(int64_t begin, int64_t end, uint8_t* slot) {
    const auto first_tensor = std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin();
    for (auto t = static_cast<size_t>(first_tensor); t < ends_.size() && frame_.offsets[t] < end; ++t) {
      const int64_t offset = frame_.offsets[t], itemsize = reader_.itemsize_bytes(t);
      const int64_t first = (std::max(begin, offset) - offset) / itemsize;
      const int64_t last = (std::min(end, ends_[t]) - offset) / itemsize;
      BCP_RETURN_IF_ERROR(reader_.want(t, first, last, slot + (offset + first * itemsize - begin)));
    }
    return Status::ok();
  }

  /// Fills in what is between the tensors, when these are there. Called for the slots in their order.
  Status complete(int64_t begin, int64_t end, uint8_t* slot) {
    for (;; ++current_) {
      const bool is_last = current_ == ends_.size();
      const int64_t gap_begin = current_ == 0 ? 0 : ends_[current_ - 1];
      const int64_t gap_end = is_last ? file_bytes_ : frame_.offsets[current_];
      if (gap_begin >= end) return Status::ok();
      if (gap_end > begin && gap_end > gap_begin) {
        if (gap_begin >= begin) gap_ = frame_.before(current_, crcs_);
        if (static_cast<int64_t>(gap_.size()) != gap_end - gap_begin) {
          return Status::make(Code::kInvalidArgument,
                              text(gap_.size(), " bytes for a gap from ", gap_begin, " to ", gap_end));
        }
        const int64_t from = std::max(begin, gap_begin), to = std::min(end, gap_end);
        std::memcpy(slot + (from - begin), gap_.data() + (from - gap_begin), static_cast<size_t>(to - from));
      }
      if (is_last) return Status::ok();
      const int64_t from = std::max(begin, frame_.offsets[current_]), to = std::min(end, ends_[current_]);
      if (from < to && frame_.needs_crcs)
        crcs_[current_] = base::crc32(crcs_[current_], slot + (from - begin), static_cast<size_t>(to - from));
      if (ends_[current_] > end) return Status::ok();
    }
  }

  const ExportOptions& options_;
  const FileFrame& frame_;
  const int64_t file_bytes_;
  ElementReader reader_;
  std::vector<int64_t> ends_;   // of each tensor in the file
  std::vector<uint32_t> crcs_;  // of each tensor, as far as the file is filled
  size_t current_ = 0;          // the tensor in which, or before which, the file is filled next
  std::string gap_;             // what is before it, perhaps in several slots
};

}  // namespace

base::Result<ExportedFile> export_file(const ExportOptions& options, std::shared_ptr<const format::Manifest> checkpoint,
                                       const CheckpointView* view, const std::vector<TensorToRead>& tensors,
                                       const FileFrame& frame) {
  Exporter exporter(options, std::move(checkpoint), view, frame);
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
