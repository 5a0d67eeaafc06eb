// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/export/element_reader.h"
#include "csrc/engine/load/checkpoint_view.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::engine {

/// What a file has beside its tensors.
struct FileFrame {
  std::vector<int64_t> offsets;  // of the first element of each tensor; multiples of the size of an element
  int64_t file_bytes = 0;
  /// Returns the bytes between tensor `number - 1` and tensor `number`. The first are those before all tensors, the
  /// last those behind them. `crcs` has the CRC of each tensor before, if they are needed.
  std::function<std::string(size_t number, const std::vector<uint32_t>& crcs)> before;
  bool needs_crcs = false;  // of tensors, for `before`
};

/// How a file is written.
struct ExportOptions {
  LoadOptions reading;  // what is read, and how
  std::string path;     // of the new file
  bool direct_io = true;
  int num_io_threads = 2;         // threads that write
  bool needs_crc = true;          // of the file
  int64_t ring_bytes = 32 << 20;  // memory for what is written; what is read takes `reading.ring_bytes` in addition
  ConvertElements convert;        // needed where a dtype differs from the stored one
  std::unordered_set<std::string> computed;  // names of tensors whose elements all go through `convert`
  StoredChecksums* checksums = nullptr;      // which the runs follow, if any
  /// Called in the calling thread with the bytes that were filled so far; false ends the export with kCancelled.
  std::function<bool(int64_t)> progress;
};

/// What was written.
struct ExportedFile {
  int64_t bytes = 0;
  uint32_t crc = 0;  // of all bytes of the file; 0 if nobody needs it
};

/// Writes a file of another format from a checkpoint, front to back:
///
///     | before(0) | tensor 0 | before(1) | tensor 1 | ...    | before(n)  |
///     slots  |                   |                   |                   |   8 MiB each
///
/// Two slots at a time are filled by one `ElementReader::run`. Meanwhile other threads write the slots before. So
/// memory does not grow with the checkpoint, nor with a tensor.
///
/// \param checkpoint  Of `options.reading.directory`.
/// \param view        If `checkpoint` is that of a view; else null.
/// \param tensors     In the order of their offsets.
/// \returns kInvalidArgument for a tensor that is not there or lacks elements, and for offsets that do not fit.
/// kUnsupported for a tensor that is not plain. kCorrupt, kChanged and kStorage, of what is read or written.
/// kCancelled. After a failure the file may be there in part.
base::Result<ExportedFile> export_file(const ExportOptions& options, std::shared_ptr<const format::Manifest> checkpoint,
                                       const CheckpointView* view, const std::vector<TensorToRead>& tensors,
                                       const FileFrame& frame);

/// Reads a whole file, past the page cache where the file system can, and returns its CRC.
/// \param progress  As in `ExportOptions`. \returns kStorage; kCancelled.
base::Result<uint32_t> checksum_of_file(const std::string& directory, const std::string& name,
                                        const std::function<bool(int64_t)>& progress);

}  // namespace bytecheckpoint::engine
