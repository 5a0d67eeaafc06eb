// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/save/file_image.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "csrc/base/crc32.h"
#include "csrc/base/failpoint.h"
#include "csrc/base/named_thread.h"
#include "csrc/io/directory.h"
#include "csrc/staging/merge.h"

namespace bytecheckpoint::engine {
namespace {

/// Copied, then summed, in pieces of this size: the second pass finds a piece in the first-level cache.
constexpr int64_t kPieceBytes = 32 << 10;

/// A thread more is worth its start for so many blocks, which take some tenths of a millisecond.
constexpr size_t kPartsAThread = 8;

/// Of so many small parts in a row, one is timed, and counts for all of them.
constexpr int64_t kSmallPartsATime = 8;

/// Fills nothing: the bytes are where they are written from.
constexpr auto kInPlace = [](int64_t, int64_t, uint8_t*) {};

}  // namespace

base::Result<std::unique_ptr<FileImage>> FileImage::create(const std::string& directory, const format::DataFileId& id,
                                                           bool direct_io, bool is_plain, SlotPipeline pipeline) {
  std::unique_ptr<FileImage> image(new FileImage());
  image->pipeline_ = pipeline;
  image->is_plain_ = is_plain;
  image->entry_.id = id;
  image->entry_.name = format::data_file_name(id);
  const std::string path = io::join(directory, image->entry_.name);
  BCP_ASSIGN_OR_RETURN(image->file_, pipeline.deadline->run("open", path, [path, direct_io] {
    return io::File::create(path, direct_io);
  }));
  BCP_FAILPOINT(kWriteFileCreated);
  if (!is_plain) BCP_RETURN_IF_ERROR(image->append(format::encode_header(id)));
  return image;
}

std::optional<int> FileImage::pop_slot(base::Status* outcome) {
  std::optional<int> slot = pipeline_.free_slots->try_pop();
  if (slot.has_value()) return slot;
  const base::SpanTimer timer(pipeline_.lane, base::Phase::kWaitSlot);
  if (!pipeline_.writer->is_bounded()) return pipeline_.free_slots->pop();
  for (bool is_over = false; !is_over && outcome->is_ok() && !slot.has_value();) {
    slot = pipeline_.free_slots->pop_for(io::PendingCalls::kLook, &is_over);
    // The wait itself has no limit, because slots also come late where writes are paced. The writer knows whether a
    // call takes too long.
    if (!slot.has_value()) *outcome = pipeline_.writer->status();
  }
  return slot;
}

base::Status FileImage::take_slot() {
  base::Status outcome = pipeline_.writer->status();
  const std::optional<int> slot = outcome.is_ok() ? pop_slot(&outcome) : std::nullopt;
  if (!outcome.is_ok()) return outcome;
  if (!slot.has_value()) return base::Status::make(base::Code::kCancelled, "save stopped");
  slots_.push_back(*slot);
  return base::Status::ok();
}

void FileImage::extend(const uint8_t* from, int64_t bytes) {
  const auto* const first = reinterpret_cast<const char*>(from);
  const auto size = static_cast<size_t>(bytes);
  if (!pieces_.empty() && pieces_.back().data() + pieces_.back().size() == first) {
    pieces_.back() = {pieces_.back().data(), pieces_.back().size() + size};
  } else {
    pieces_.emplace_back(first, size);
  }
}

void FileImage::hand_over_slot() {
  if (slots_.empty()) return;
  record_times();
  const int slot = slots_.front();
  slots_.pop_front();
  slot_used_ = 0;
  pipeline_.writer->submit({&file_, std::exchange(pieces_, {}), position_ - pieces_begin_, pieces_begin_, slot});
  pieces_begin_ = position_;
}

int64_t FileImage::slot_end(int64_t position) const {
  return position + staging::kSlotBytes - (slot_used_ + position - position_) % staging::kSlotBytes;
}

base::Result<int64_t> FileImage::take_slots(int64_t end, int most_slots) {
  const auto taken_end = [&] {
    return position_ - slot_used_ + static_cast<int64_t>(slots_.size()) * staging::kSlotBytes;
  };
  while (taken_end() < end && static_cast<int>(slots_.size()) < most_slots) BCP_RETURN_IF_ERROR(take_slot());
  ahead_end_ = taken_end();
  return ahead_end_;
}

uint8_t* FileImage::memory(int64_t position) const {
  const int64_t at = slot_used_ + position - position_;
  return pipeline_.ring->slot(slots_[static_cast<size_t>(at / staging::kSlotBytes)]) + at % staging::kSlotBytes;
}

void FileImage::note_times(int64_t begin_ns, int64_t copied_ns, int64_t summed_ns, int64_t end_ns, int64_t weight) {
  const auto whole = static_cast<double>(end_ns - begin_ns);
  const auto first_piece = static_cast<double>(std::max<int64_t>(summed_ns - begin_ns, 1));
  const auto copy_ns = static_cast<int64_t>(whole * static_cast<double>(copied_ns - begin_ns) / first_piece);
  if (times_.begin_ns == 0) times_.begin_ns = begin_ns;
  times_.end_ns = end_ns;
  times_.copy_ns += weight * copy_ns;
  times_.checksum_ns += weight * (end_ns - begin_ns - copy_ns);
}

void FileImage::record_times() {
  const FillTimes now = std::exchange(times_, {});
  if (pipeline_.lane == nullptr || now.begin_ns == 0) return;
  const int64_t all = position_ - pieces_begin_;
  if (slot_used_ > 0) {
    pipeline_.lane->add_span({base::Phase::kCopy, now.begin_ns, now.end_ns, now.copy_ns, 1, slot_used_});
  }
  pipeline_.lane->add_span({base::Phase::kChecksum, now.begin_ns, now.end_ns, now.checksum_ns, 1, all});
}

void FileImage::advance(int64_t part, uint32_t sum) {
  position_ += part;
  if (records_done_) return;
  block_crc_ = sum;
  if (position_ % format::kBlockBytes == 0) table_.push_back(std::exchange(block_crc_, 0));
}

template <class Fill>
base::Status FileImage::emit(int64_t bytes, uint32_t* crc, Fill&& fill) {
  uint8_t* const to = next_in_memory(bytes);
  return to == nullptr ? emit_to_slots(bytes, crc, nullptr, fill) : emit_to_memory(to, bytes, crc, fill);
}

template <class Fill>
base::Status FileImage::emit_to_memory(uint8_t* to, int64_t bytes, uint32_t* crc, Fill&& fill) {
  BCP_RETURN_IF_ERROR(pipeline_.writer->status());
  hand_over_slot();  // it ends where these bytes begin
  const base::SpanTimer timer(pipeline_.lane, base::Phase::kCopy, bytes);
  const int64_t first = std::min(bytes, format::kBlockBytes - position_ % format::kBlockBytes);
  const auto begin_of = [&](size_t part) {
    return part == 0 ? 0 : std::min(bytes, first + static_cast<int64_t>(part - 1) * format::kBlockBytes);
  };
  std::vector<uint32_t> sums(1 + static_cast<size_t>((bytes - first + format::kBlockBytes - 1) / format::kBlockBytes));
  std::atomic<size_t> next{0};
  const auto fill_parts = [&] {
    for (size_t part = next++; part < sums.size(); part = next++) {
      const int64_t end = begin_of(part + 1);
      for (int64_t begin = begin_of(part), behind = 0; begin < end; begin = behind) {
        behind = std::min(end, begin + kPieceBytes);
        fill(begin, behind, to + begin);
        sums[part] = base::crc32(sums[part], to + begin, static_cast<size_t>(behind - begin));
      }
    }
  };
  base::work_together("bcp-fill", std::min(static_cast<size_t>(pipeline_.num_threads), sums.size() / kPartsAThread),
                      fill_parts);
  if (crc != nullptr) *crc = 0;
  for (size_t part = 0; part < sums.size(); ++part) {
    const int64_t size = begin_of(part + 1) - begin_of(part);
    if (crc != nullptr) *crc = base::crc32_combine(*crc, sums[part], static_cast<uint64_t>(size));
    advance(size, base::crc32_combine(block_crc_, sums[part], static_cast<uint64_t>(size)));
  }
  pieces_begin_ = position_;
  pipeline_.writer->count(bytes);
  return base::Status::ok();
}

template <class Fill>
base::Status FileImage::emit_to_slots(int64_t bytes, uint32_t* crc, const uint8_t* borrowed, Fill&& fill) {
  for (int64_t done = 0; done < bytes;) {
    if (slots_.empty()) BCP_RETURN_IF_ERROR(take_slot());
    const int64_t block_end = base::align_down(position_, format::kBlockBytes) + format::kBlockBytes;
    const int64_t room = borrowed == nullptr ? staging::kSlotBytes - slot_used_ : bytes;
    const int64_t part = std::min({bytes - done, block_end - position_, room});
    uint8_t* const to = memory(position_);
    const uint8_t* const from = borrowed == nullptr ? to : borrowed + done;
    // With a CRC of its own to return, that one is computed, and combined into the block's. Otherwise the block's CRC
    // is continued.
    uint32_t sum = crc == nullptr ? block_crc_ : 0;
    const bool is_small = part < 2 * kPieceBytes;
    const bool is_timed = pipeline_.lane != nullptr && (!is_small || ++num_small_ % kSmallPartsATime == 0);
    const int64_t begin_ns = is_timed ? base::now_ns() : 0;
    int64_t copied_ns = 0, summed_ns = 0;
    for (int64_t piece = 0; piece < part; piece += kPieceBytes) {
      const int64_t size = std::min(kPieceBytes, part - piece);
      fill(done + piece, done + piece + size, to + piece);
      if (is_timed && piece == 0) copied_ns = base::now_ns();
      sum = base::crc32(sum, from + piece, static_cast<size_t>(size));
      if (hasher_ != nullptr && crc != nullptr) hasher_->add(from + piece, static_cast<size_t>(size));
      if (is_timed && piece == 0) summed_ns = base::now_ns();
    }
    if (is_timed) note_times(begin_ns, copied_ns, summed_ns, base::now_ns(), is_small ? kSmallPartsATime : 1);
    if (crc != nullptr) {
      *crc = done == 0 ? sum : base::crc32_combine(*crc, sum, static_cast<uint64_t>(part));
      sum = base::crc32_combine(block_crc_, sum, static_cast<uint64_t>(part));
    }
    done += part;
    extend(from, part);
    if (borrowed == nullptr) slot_used_ += part;
    advance(part, sum);
    // Borrowed bytes end at a multiple of kDirectAlignment, and so does a full slot: it began at one.
    const bool is_enough = borrowed != nullptr && position_ - pieces_begin_ >= staging::kSlotBytes;
    if (is_enough || slot_used_ == staging::kSlotBytes) hand_over_slot();
  }
  return base::Status::ok();
}

base::Status FileImage::append(std::string_view bytes) {
  return emit(static_cast<int64_t>(bytes.size()), nullptr, [&](int64_t begin, int64_t end, uint8_t* to) {
    std::memcpy(to, bytes.data() + begin, static_cast<size_t>(end - begin));
  });
}

base::Status FileImage::append_elements(const tensor::StridedView& view, int64_t bytes, uint32_t* crc) {
  *crc = 0;
  const tensor::BoxRuns runs(view);
  return emit(bytes, crc, [&](int64_t begin, int64_t end, uint8_t* to) {
    staging::gather_window(runs, view.data, begin, end, to);
  });
}

base::Status FileImage::append_in_place(int64_t bytes, uint32_t* crc) {
  *crc = 0;
  return emit_to_slots(bytes, crc, nullptr, kInPlace);
}

base::Status FileImage::append_borrowed(const uint8_t* memory, int64_t bytes, uint32_t* crc) {
  *crc = 0;
  const bool is_aligned =
      reinterpret_cast<uintptr_t>(memory) % io::kDirectAlignment == 0 && position_ % io::kDirectAlignment == 0;
  const bool is_written = next_in_memory(bytes) == nullptr && file_.takes_any_memory();
  const int64_t whole = is_aligned && is_written ? base::align_down(bytes, io::kDirectAlignment) : 0;
  BCP_RETURN_IF_ERROR(emit_to_slots(whole, crc, memory, kInPlace));
  uint32_t rest_crc = 0;
  BCP_RETURN_IF_ERROR(emit(bytes - whole, &rest_crc, [&](int64_t begin, int64_t end, uint8_t* to) {
    std::memcpy(to, memory + whole + begin, static_cast<size_t>(end - begin));
  }));
  *crc = base::crc32_combine(*crc, rest_crc, static_cast<uint64_t>(bytes - whole));
  return base::Status::ok();
}

base::Status FileImage::pad_to(int64_t alignment) {
  return append(std::string(static_cast<size_t>(base::align_up(position_, alignment) - position_), '\0'));
}

base::Status FileImage::finish_records() {
  BCP_FAILPOINT(kWriteRecordsDone);
  if (is_plain_) {
    hand_over_slot();
    entry_.bytes = position_;
    return base::Status::ok();
  }
  format::DataTrailer trailer;
  trailer.id = entry_.id;
  trailer.end_of_records = position_;
  if (position_ % format::kBlockBytes != 0) table_.push_back(block_crc_);
  records_done_ = true;
  trailer.num_blocks = static_cast<int64_t>(table_.size());
  const std::string table = format::encode_block_table(table_);
  trailer.table_crc = base::crc32(0, table.data(), table.size());
  BCP_RETURN_IF_ERROR(append(table));
  BCP_RETURN_IF_ERROR(append(format::encode_data_trailer(&trailer)));
  hand_over_slot();
  entry_.bytes = position_;
  entry_.trailer_crc = trailer.trailer_crc;
  return base::Status::ok();
}

base::Status FileImage::settle(bool sync) {
  // Gives back the space that was reserved beyond the end.
  BCP_RETURN_IF_ERROR(file_.truncate(entry_.bytes));
  BCP_FAILPOINT(kWriteFileCut);
  if (sync) BCP_RETURN_IF_ERROR(file_.sync());
  BCP_FAILPOINT(kWriteFileSynced);
  return file_.close();
}

}  // namespace bytecheckpoint::engine
