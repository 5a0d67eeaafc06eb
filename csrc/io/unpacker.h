// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "csrc/base/mutex.h"
#include "csrc/base/packing.h"
#include "csrc/base/status.h"

namespace bytecheckpoint::io {

/// Unpacks a stretch of a file, of any length in little memory: as much as zstd's window needs, mostly 2 MiB.
///
/// zstd unpacks from front to back. So a read behind the last one goes on from there, and one before it begins again.
/// An unpacker that its file has left in the middle is kept for the next file with the same content (`borrow`): whoever
/// reads a stretch piece by piece, each time from a file newly opened, unpacks it once. As many are kept as take 24
/// MiB. Those that have come to the end are not.
///
/// Thread-safe; readers take turns.
class Unpacker {
 public:
  /// Reads up to `size` bytes at `offset` of the packed file. \returns how many bytes it has read.
  using ReadPacked = std::function<base::Result<int64_t>(void* bytes, int64_t size, int64_t offset)>;

  /// Returns one that nobody else uses.
  /// \param content     What another file or another content would not have.
  /// \param read_bytes  How much to read at a time.
  /// \returns kUnsupported if the machine has no zstd.
  static base::Result<std::shared_ptr<Unpacker>> borrow(const std::string& content, const base::Packing& packing,
                                                        int64_t read_bytes);
  ~Unpacker();
  Unpacker(const Unpacker&) = delete;
  Unpacker& operator=(const Unpacker&) = delete;

  int64_t size() const { return packing_.unpacked_bytes; }
  /// Reads until `size` bytes or the end of what is unpacked. \returns the number of bytes read. kCorrupt for bytes
  /// that zstd did not pack, or that unpack to more or less than they should; if zstd has stored a checksum, it is
  /// compared with the end of a read of the last byte. kUnsupported for a window of more than 16 MiB. What `read` fails
  /// with.
  base::Result<int64_t> read_at(void* bytes, int64_t size, int64_t offset, const ReadPacked& read);

 private:
  Unpacker(std::string content, const base::Packing& packing, int64_t read_bytes);
  /// Unpacks the next bytes. \returns less than `size` only at the end.
  base::Result<int64_t> unpack(uint8_t* to, int64_t size, const ReadPacked& read) BCP_REQUIRES(mutex_);
  /// Makes sure that nothing is left over.
  base::Status check_end(const ReadPacked& read) BCP_REQUIRES(mutex_);
  base::Status fill(const ReadPacked& read) BCP_REQUIRES(mutex_);
  void begin_again() BCP_REQUIRES(mutex_);
  static void give_back(Unpacker* unpacker);

  const std::string content_;
  const base::Packing packing_;
  const int64_t read_bytes_;
  base::Mutex mutex_;
  void* const stream_;  // zstd's
  std::unique_ptr<uint8_t[]> packed_ BCP_GUARDED_BY(mutex_);
  size_t packed_begin_ BCP_GUARDED_BY(mutex_) = 0;  // of what is in `packed_`, and is not yet unpacked
  size_t packed_end_ BCP_GUARDED_BY(mutex_) = 0;
  int64_t taken_ BCP_GUARDED_BY(mutex_) = 0;     // bytes of the stretch that were read
  int64_t position_ BCP_GUARDED_BY(mutex_) = 0;  // of the next byte that is unpacked
  bool is_frame_over_ BCP_GUARDED_BY(mutex_) = false;
  bool is_sound_ BCP_GUARDED_BY(mutex_) = true;
};

}  // namespace bytecheckpoint::io
