// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/export_file.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/base/bounded_queue.h"
#include "csrc/base/crc32.h"
#include "csrc/engine/row_major_reader.h"
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

/// A tensor to export, and where its elements come to lie.
struct Source {
  int64_t offset = 0;
  int64_t numel = 0;
  tensor::DType dtype = tensor::DType::kNone;         // in the file
  int64_t itemsize = 0;                               // in the file
  tensor::DType stored_dtype = tensor::DType::kNone;  // kNone if it has no elements

  int64_t end() const { return offset + numel * itemsize; }
};

/// Elements that are read in their own dtype, and then converted into a slot.
struct ToConvert {
  tensor::DType from, to;
  std::vector<uint8_t> elements;
  uint8_t* converted;
  int64_t count;
};

class Exporter {
 public:
  Exporter(const ExportOptions& options, std::shared_ptr<const format::Manifest> checkpoint, const CheckpointView* view,
           std::string_view head, int64_t file_bytes)
      : options_(options),
        head_(head),
        file_bytes_(file_bytes),
        reader_(options.reading, std::move(checkpoint), view) {}

  Status locate(const std::vector<TensorToExport>& tensors) {
    std::vector<std::string> fqns;
    for (const TensorToExport& tensor : tensors) fqns.push_back(tensor.fqn);
    BCP_RETURN_IF_ERROR(reader_.locate(fqns));
    int64_t at = static_cast<int64_t>(head_.size());
    for (size_t t = 0; t < tensors.size(); ++t) {
      const TensorToExport& tensor = tensors[t];
      const tensor::DTypeInfo* info = tensor::find_plain_dtype(tensor.dtype);
      if (info == nullptr) return refuse(tensor.fqn, "its dtype in the file is not plain");
      const Source source{tensor.offset, reader_.numel(t), tensor.dtype, info->itemsize_bytes, reader_.dtype(t)};
      if (source.offset != at || source.offset % source.itemsize != 0) {
        return refuse(tensor.fqn, text("it begins at ", source.offset, ", but what is before it ends at ", at));
      }
      at = source.end();
      sources_.push_back(source);
    }
    if (at != file_bytes_) {
      return Status::make(Code::kInvalidArgument, text("the tensors end at ", at, ", the file at ", file_bytes_));
    }
    return Status::ok();
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
  static Status refuse(const std::string& fqn, const std::string& why) {
    return Status::make(Code::kInvalidArgument, text("'", fqn, "': ", why));
  }

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
      const base::Result<LoadStats> read = reader_.run(cancelled);
      if (!read.is_ok()) return read.status();
      for (const ToConvert& each : to_convert_) {
        BCP_RETURN_IF_ERROR(options_.convert(each.from, each.elements.data(), each.to, each.converted, each.count));
      }
      to_convert_.clear();
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
    const auto is_before = [](const Source& source, int64_t at) { return source.end() <= at; };
    auto source = std::lower_bound(sources_.begin(), sources_.end(), begin, is_before);
    for (; source != sources_.end() && source->offset < end; ++source) {
      const int64_t first = (std::max(begin, source->offset) - source->offset) / source->itemsize;
      const int64_t last = (std::min(end, source->end()) - source->offset) / source->itemsize;
      if (first == last) continue;
      uint8_t* to = slot + (source->offset + first * source->itemsize - begin);
      if (source->stored_dtype != source->dtype) {
        const int64_t stored_itemsize = tensor::find_dtype(source->stored_dtype)->itemsize_bytes;
        std::vector<uint8_t> elements(static_cast<size_t>((last - first) * stored_itemsize));
        to_convert_.push_back({source->stored_dtype, source->dtype, std::move(elements), to, last - first});
        to = to_convert_.back().elements.data();
      }
      BCP_RETURN_IF_ERROR(reader_.want(static_cast<size_t>(source - sources_.begin()), first, last, to));
    }
    return Status::ok();
  }

  const ExportOptions& options_;
  const std::string_view head_;
  const int64_t file_bytes_;
  RowMajorReader reader_;
  std::vector<Source> sources_;        // in the order of their offsets
  std::vector<ToConvert> to_convert_;  // by the next run
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
