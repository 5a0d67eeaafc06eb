// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/base/bounded_queue.h"
#include "csrc/base/content_hash.h"
#include "csrc/base/status.h"
#include "csrc/base/trace.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/io/file.h"
#include "csrc/io/io_deadline.h"
#include "csrc/io/writer.h"
#include "csrc/staging/slot_ring.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::engine {

/// What all data files of one save share: slots to fill, the threads that write them, and a deadline for all other
/// calls.
struct SlotPipeline {
  staging::SlotRing* ring;
  base::BoundedQueue<int>* free_slots;
  io::Writer* writer;
  io::IoDeadline* deadline;
  base::TraceLane* lane;  // records what the filling thread does; null: nothing does
  int num_threads;        // that fill a file which is memory, the filling thread among them; 0: it is written
};

/// How long the filling thread copied and computed CRCs since it took the slot. The clock is read four times a block,
/// not twice a piece, and for some small parts only: the first piece shows how a block's time is shared out.
struct FillTimes {
  int64_t begin_ns = 0;  // 0: nothing so far
  int64_t end_ns = 0;
  int64_t copy_ns = 0;
  int64_t checksum_ns = 0;
};

/// One data file, written front to back. Each byte is copied once, into a slot, and its CRC is computed while it is in
/// the cache. A full slot goes to the writer's threads, and the next free one is filled meanwhile. `save_job.h` has the
/// picture.
///
///     create -> append_* ... -> finish_records -> (the writer finishes) -> settle
///
/// Memory that stays as it is until the writer finishes need not be copied. It is written between the bytes of a slot:
///
///     file          |head|  large tensor a  |tail, head|     large tensor b     |tail, ...
///     slot          |****|                  |**********|                        |****
///     other memory       |******************|          |************************|
///
/// A file that is memory (`io::File::memory`) is filled in its place, by several threads: each copies a block, and sums
/// it while it is in the cache of its core. What lies on devices goes through slots, which are page-locked.
///
/// Not thread-safe. Calls may wait for a free slot.
class FileImage {
 public:
  /// Creates the file and appends its header. \returns kStorage, also if the storage does not answer in time.
  /// \param is_plain  The file has records alone, as stock DCP writes it: no header, block table and trailer.
  static base::Result<std::unique_ptr<FileImage>> create(const std::string& directory, const format::DataFileId& id,
                                                         bool direct_io, bool is_plain, SlotPipeline pipeline);

  /// Position of the next byte, from the start of the file.
  int64_t position() const { return position_; }
  const io::File& file() const { return file_; }
  const format::FileEntry& entry() const { return entry_; }

  /// Reserves disk space, so that a full disk is noticed before the first byte is written. Has no deadline of its own,
  /// like `settle`.
  base::Status reserve(int64_t bytes) { return file_.reserve(bytes); }
  /// Appends bytes. \returns the first failure of the writer so far, or kCancelled.
  base::Status append(std::string_view bytes);
  /// Appends the elements of a tensor as row-major bytes. \param crc  Receives their CRC-32.
  base::Status append_elements(const tensor::StridedView& view, int64_t bytes, uint32_t* crc);
  /// Appends bytes that nobody changes before the writer has finished, without a copy where that can be: both their
  /// place in memory and `position` must be multiples of io::kDirectAlignment, and the file be no object of a store.
  /// \param crc  Receives their CRC-32.
  base::Status append_borrowed(const uint8_t* memory, int64_t bytes, uint32_t* crc);
  /// Takes slots for the bytes up to `end`, but not more than `most_slots`, so that they can be filled ahead, in any
  /// order. \returns the position behind these slots.
  base::Result<int64_t> take_slots(int64_t end, int most_slots);
  /// Returns where in the slots that are taken the byte at `position` is.
  uint8_t* memory(int64_t position) const;
  /// Returns the position behind the slot in which that byte is.
  int64_t slot_end(int64_t position) const;
  /// Appends bytes that are in their place in `memory` already. \param crc  Receives their CRC-32.
  base::Status append_in_place(int64_t bytes, uint32_t* crc);
  /// Adds what is appended from now on with a CRC of its own to `hasher`, in the same pass; null: no longer.
  void hash_with(base::ContentHasher* hasher) { hasher_ = hasher; }
  /// Appends zeros up to a multiple of `alignment`.
  base::Status pad_to(int64_t alignment);

  /// Appends the block table and the trailer, and hands the last slot to the writer. `entry()` is complete afterwards.
  base::Status finish_records();
  /// Lets the writer's threads sync what is written of the file so far, beside the writes of the next one. `settle` is
  /// as needed as without.
  void sync_early() { pipeline_.writer->submit({&file_, {}, 0, position_, /*slot=*/-1}); }
  /// Sets the final size, syncs unless `sync` is false, and closes the file. Call it when the writer has written all of
  /// the file. An error of close fails the save even after an fsync, where it should be harmless: not every file system
  /// keeps to that.
  base::Status settle(bool sync);

 private:
  FileImage() = default;

  /// Appends `bytes` bytes: calls `fill(begin, end, to)` for consecutive pieces, none of which crosses a slot or a
  /// block.
  /// \param crc  If not null, receives the CRC of these bytes; the blocks' CRCs are computed in any case.
  /// May call it from several threads at once, if the file is memory.
  template <class Fill>
  base::Status emit(int64_t bytes, uint32_t* crc, Fill&& fill);
  /// The same by way of slots, one piece behind the other.
  /// \param borrowed  If not null, the bytes are there, and nothing is filled.
  template <class Fill>
  base::Status emit_to_slots(int64_t bytes, uint32_t* crc, const uint8_t* borrowed, Fill&& fill);
  /// The same in the file itself, of which the next bytes are at `to`.
  template <class Fill>
  base::Status emit_to_memory(uint8_t* to, int64_t bytes, uint32_t* crc, Fill&& fill);
  /// Returns where the next bytes of the file are in memory; null if they are to be written, as slots are that are
  /// filled ahead.
  uint8_t* next_in_memory(int64_t bytes) const {
    return pipeline_.num_threads > 0 && hasher_ == nullptr && position_ >= ahead_end_ ? file_.memory(position_, bytes)
                                                                                      : nullptr;
  }
  /// Goes on by a part of the block that `position_` is in. \param sum  CRC of the block so far, the part included.
  void advance(int64_t part, uint32_t sum);
  base::Status take_slot();
  std::optional<int> pop_slot(base::Status* outcome);
  /// Adds bytes, which are in memory, to what is handed over next.
  void extend(const uint8_t* from, int64_t bytes);
  void hand_over_slot();
  /// Notes that a part of a block took from `begin_ns` to `end_ns`, and its first piece was copied and summed in
  /// between. \param weight  How many parts of that kind it stands for.
  void note_times(int64_t begin_ns, int64_t copied_ns, int64_t summed_ns, int64_t end_ns, int64_t weight);
  void record_times();

  io::File file_;
  format::FileEntry entry_;
  SlotPipeline pipeline_{};
  bool is_plain_ = false;
  std::deque<int> slots_;                 // that are taken; the first one has the next byte
  int64_t slot_used_ = 0;                 // bytes of the first one
  int64_t ahead_end_ = 0;                 // position behind the slots that were taken ahead
  std::vector<std::string_view> pieces_;  // what is handed over with the first one: its own bytes, and borrowed ones
  int64_t pieces_begin_ = 0;              // file position of the first of them
  int64_t position_ = 0;
  base::ContentHasher* hasher_ = nullptr;
  uint32_t block_crc_ = 0;  // CRC of the block that position_ is in, so far
  std::vector<uint32_t> table_;
  FillTimes times_;
  int64_t num_small_ = 0;  // small parts so far
  bool records_done_ = false;
};

}  // namespace bytecheckpoint::engine
