// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "csrc/base/bounded_queue.h"
#include "csrc/base/status.h"
#include "csrc/format/manifest.h"
#include "csrc/io/file.h"
#include "csrc/io/patience.h"
#include "csrc/io/writer.h"
#include "csrc/staging/slot_ring.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::engine {

/// What the data files of one save share: slots to fill, threads that write them, and patience with all other calls.
struct SlotPipeline {
  staging::SlotRing* ring;
  base::BoundedQueue<int>* free_slots;
  io::Writer* writer;
  io::Patience* patience;
};

/// One data file as a stream of bytes: each byte is copied into a slot once, its CRC taken while it is in cache, and
/// full slots leave for the writer while the next one fills.
class FileImage {
 public:
  /// Creates the file and begins it with its header.
  static base::Result<std::unique_ptr<FileImage>> create(const std::string& directory, const format::DataFileId& id,
                                                         bool direct_io, SlotPipeline pipeline);

  /// Position of the next byte, from the start of the file.
  int64_t position() const { return position_; }
  const io::File& file() const { return file_; }
  const format::FileEntry& entry() const { return entry_; }

  /// Asks for disk space, so that a full disk is known before the first byte. Takes what that takes, as `settle`.
  base::Status reserve(int64_t bytes) { return file_.reserve(bytes); }
  base::Status append(std::string_view bytes);
  /// Row-major bytes of a tensor. \param crc  Receives their CRC-32.
  base::Status append_elements(const tensor::StridedView& view, int64_t bytes, uint32_t* crc);
  base::Status pad_to(int64_t alignment);

  /// Block table and trailer; hands the last slot to the writer. `entry()` is complete from here on.
  base::Status finish_records();
  /// After the writer has finished: size, then fsync unless `sync` is false, then close. An error of close is one of
  /// the save also behind an fsync, where it would be harmless: not every file system keeps to that.
  base::Status settle(bool sync);

 private:
  FileImage() = default;

  /// Calls `fill(begin, end, to)` for consecutive pieces of `bytes` bytes that fit slots and blocks.
  template <class Fill>
  base::Status emit(int64_t bytes, uint32_t* crc, Fill&& fill);
  base::Status take_slot();
  void hand_over_slot();

  io::File file_;
  format::FileEntry entry_;
  SlotPipeline pipeline_{};
  int slot_ = -1;
  int64_t slot_begin_ = 0;  // file position of the slot's first byte
  int64_t position_ = 0;
  uint32_t block_crc_ = 0;  // of the block that position_ is in
  std::vector<uint32_t> table_;
  bool records_done_ = false;
};

}  // namespace bytecheckpoint::engine
