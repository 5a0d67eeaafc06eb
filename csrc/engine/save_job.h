// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/file_image.h"
#include "csrc/format/write_result.h"
#include "csrc/io/patience.h"

namespace bytecheckpoint::engine {

struct SaveOptions {
  std::string directory;
  uint32_t rank = 0;
  bool direct_io = true;
  bool sync = true;                // fsync files and directory before the result is handed in
  bool one_file_a_record = false;  // else one file a rank
  int num_io_threads = 1;
  int64_t ring_bytes = staging::kDefaultRingBytes;  // rounded up to whole slots, at least two
  int64_t expected_bytes = 0;                       // space to ask for before the first byte
  int niceness = 0;                                 // added to that of the threads that write
  int64_t bytes_per_s = 0;                          // most that are written; 0: as fast as the storage takes them
  double io_timeout_s = 0;                          // of silence, after which the storage is given up; 0: never
};

struct SaveStats {
  int64_t num_records = 0;
  int64_t bytes_written = 0;
  double stage_s = 0;  // copying and summing, waiting for slots included
  double flush_s = 0;  // waiting for the last writes
  double sync_s = 0;
};

/// One rank's part of a save: records in, durable data files out. The coordinator's part is Commit.
///
///     append_* : lay out -> stage (merge + CRC into slots) -> write, by the writer's threads, beside the next stage;
///                of one file a record, those that are complete are synced and closed before too many are open
///     finish   : trailer -> last writes -> fsync of files and directory -> WriteResult
///
/// Tensor records come before all others. After any failure the job only ends; the files it made belong to the
/// coordinator, which reads their names from `file_names`. Not thread-safe; blocks without needing the GIL.
///
/// The destructor waits for calls that the storage has not answered, and closes files: see `io::DeletePatiently`.
class SaveJob {
 public:
  static base::Result<std::unique_ptr<SaveJob>> start(SaveOptions options);
  ~SaveJob();

  /// The view's memory may change again when this returns.
  base::Status append_tensor(const std::string& fqn, const tensor::Box& box, const tensor::StridedView& view);
  /// A record of the planner's own bytes.
  base::Status append_bytes(const std::string& fqn, std::string_view bytes);
  /// A record of what torch.save made of a tensor that is not plain.
  base::Status append_opaque(const std::string& fqn, const tensor::Box& box, std::string_view archive);
  /// Ends the files and makes them durable.
  base::Result<format::WriteResult> finish();

  int niceness() const { return options_.niceness; }
  /// Of all files created so far, whatever became of them.
  const std::vector<std::string>& file_names() const { return file_names_; }
  const SaveStats& stats() const { return stats_; }
  /// Bytes that have left for the files so far. Any thread, as `cancel`, unlike all else.
  int64_t bytes_done() const { return writer_->bytes_written(); }
  /// The call under way, or the next one, fails with kCancelled.
  void cancel() { writer_->cancel(); }

 private:
  explicit SaveJob(SaveOptions options, staging::BorrowedRing ring);

  base::Status append_as_is(format::RecordKind kind, const std::string& fqn, const tensor::Box& box,
                            std::string_view bytes);
  base::Result<FileImage*> image_for_record();
  base::Status finish_image();
  base::Status settle_if_many();
  base::Status settle_all();
  base::Status settle_finished();
  void note(const std::string& fqn, const tensor::Box& box, const format::Record& record);

  const SaveOptions options_;
  staging::BorrowedRing ring_;
  base::BoundedQueue<int> free_slots_;
  // Declared after what its threads use: destroyed, and so joined, first.
  std::vector<std::unique_ptr<FileImage>> images_;
  std::unique_ptr<io::Writer> writer_;
  io::Patience patience_;
  bool image_open_ = false;  // the last of images_
  size_t num_settled_ = 0;   // the first of images_
  std::vector<std::string> file_names_;
  format::WriteResult result_;
  SaveStats stats_;
};

}  // namespace bytecheckpoint::engine
