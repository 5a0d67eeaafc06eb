// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/base/trace.h"
#include "csrc/engine/save/file_image.h"
#include "csrc/engine/save/filled_records.h"
#include "csrc/engine/save/linked_files.h"
#include "csrc/engine/save/tensor_to_write.h"
#include "csrc/format/manifest/write_result.h"
#include "csrc/format/torch/record_layouts.h"
#include "csrc/io/io_deadline.h"
#include "csrc/staging/device_copies.h"

namespace bytecheckpoint::engine {

/// How one rank writes its data files.
struct SaveOptions {
  std::string directory;
  uint32_t rank = 0;
  bool direct_io = true;
  bool sync = true;                // fsync files and directory before `finish` returns
  bool one_file_a_record = false;  // true: a file for each record; false: one file a rank
  int num_io_threads = 1;
  int64_t ring_bytes = staging::kDefaultRingBytes;  // memory of the ring: whole slots, at least two
  int64_t expected_bytes = 0;                       // disk space to reserve before the first byte is written
  int niceness = 0;                                 // added to the niceness of the threads that write
  int64_t bytes_per_s = 0;                          // limit of the write speed; 0: as fast as the storage takes them
  double io_timeout_s = 0;          // a call fails if the storage has not answered for so long; 0: never
  double visibility_timeout_s = 0;  // how long to wait for the directory to be seen, where that may be late
  int64_t max_file_bytes = 0;       // a file ends before a record that would make it longer; 0: no limit
  bool is_plain = false;            // true: files of records alone, as stock DCP writes them
  std::shared_ptr<base::Trace> trace = nullptr;  // records what the threads do; null: nothing does
  bool has_hashes = false;  // computes the hashes of tensors, for the next save; needs `base::load_content_hash`
  std::shared_ptr<const LastSave> last = nullptr;  // links its files where they are unchanged; null: writes all
  LinkRule link_rule{};
};

/// What a SaveJob has done so far, and for how long the calling thread was in each stage.
struct SaveStats {
  int64_t num_records = 0;
  int64_t bytes_written = 0;
  double stage_s = 0;          // copying and computing CRCs, waiting for slots included
  double flush_s = 0;          // waiting for writes
  double sync_s = 0;           // making files final: size, fsync, close
  int64_t bytes_linked = 0;    // of files that were linked instead of being written
  int64_t bytes_compared = 0;  // of tensors that were read, to compare them with the last save
};

/// Writes the data files of one rank: takes records, and leaves durable files. The coordinator's part is `Commit`.
///
///     append_*   lay out the record -> merge it into slots, with CRCs -> hand full slots to the writer's threads
///     finish     block table and trailer -> wait for the last writes -> fsync of files and directory -> WriteResult
///
/// The calling thread fills slots of the ring while the writer's threads write others. A slot belongs to one side at a
/// time, and goes round between them through two bounded queues:
///
///     free slots ---> calling thread: gathers strided memory into the slot, CRC of each block ---> full slots
///         ^                                                                                            |
///         +------------ writer's threads: write the slot to its place in the file <--------------------+
///
///     file    |head|record 0  |record 1                         |record 2    |table|trailer|
///     blocks  |    |    |    |    |    |    |    |    |    |    |    |    |  |  256 KiB, one CRC each
///     slots   |                   |                   |                   |                |  8 MiB: 32 blocks
///
/// A record lies in one file. The memory of a save is the ring, however large the state is.
/// With one file a record, files that are complete are synced and closed before too many of them are open.
///
/// A file system in user space without direct I/O takes the writes to one file one after the other, and has little on
/// its disk before the file is synced. There a rank writes several files, more threads write, and each file is synced
/// while the next is written.
///
/// Tensor records come before all others. After a failure the owner only ends the job. Its files belong to the
/// coordinator, which deletes them by `file_names`.
///
/// Thread safety: any thread may call `cancel` and `bytes_done`; one thread at a time calls all else. Calls block for
/// I/O and need no GIL.
///
/// The destructor waits for calls that the storage has not answered, and closes files: an owner that must not wait
/// deletes the job with `io::DeleteInBackground`.
class SaveJob {
 public:
  /// Borrows a ring and starts the writer's threads. Creates no file yet. \returns kStorage if there is no memory for a
  /// ring.
  static base::Result<std::unique_ptr<SaveJob>> start(SaveOptions options);
  ~SaveJob();

  /// Appends a tensor record: `box` of the tensor `fqn`, with the elements of `view`. When this returns, they are
  /// copied, but need not be on disk. The memory of the view may change again. A large tensor that was staged
  /// (`staging::find_staged`) is not copied again: that memory must stay as it is until `finish` has returned.
  /// \returns kCorrupt if the view is staged memory that changed since it was staged. kStorage, also for an earlier
  /// write that failed. kCancelled.
  base::Status append_tensor(const std::string& fqn, const tensor::Box& box, const tensor::StridedView& view);
  /// Appends all of `tensors`: those on the host in their order, then those on devices. These are copied into the slots
  /// from which they are written; when this returns, they may change again. With a niceness it does so in a thread that
  /// has it, and waits for that: the calling thread runs Python, and if it waited for a core, others would wait for its
  /// GIL.
  /// \param copies  Knows the devices; null if there are none.
  /// \returns what `append_tensor` returned for the first that failed, with its FQN. kDevice.
  base::Status append_tensors(const std::vector<TensorToWrite>& tensors, staging::DeviceCopies* copies = nullptr);
  /// The same for all tensors of the save. With `SaveOptions::last`, those that are unchanged are not written where the
  /// file that has them can be linked. The others that are unchanged get a file of their own, so that the next save can
  /// link it.
  base::Status append_all(std::vector<TensorToWrite> tensors, staging::DeviceCopies* copies = nullptr);
  /// Appends records whose bytes `source` puts into the slots from which they are written: some slots a run,
  /// however many records these hold, while the slots before are written.
  /// \returns what `append_tensor` returns, and what `source` returned.
  base::Status append_filled(const std::vector<RecordToFill>& records, const RecordSource& source);
  /// Appends a record of bytes that the planner made.
  base::Status append_bytes(const std::string& fqn, std::string_view bytes);
  /// Appends a record of what `torch.save` made of a tensor that is not plain.
  base::Status append_opaque(const std::string& fqn, const tensor::Box& box, std::string_view archive);
  /// Ends the files, waits until all is written, and makes it durable.
  /// \returns the files and records, for the coordinator. kStorage. kCancelled.
  base::Result<format::WriteResult> finish();

  /// Names of all files that were created so far, whatever became of them.
  const std::vector<std::string>& file_names() const { return file_names_; }
  /// Names of all that were linked. Other saves name the same files so: see `Commit::abort`.
  const std::vector<std::string>& link_names() const { return linked_.names(); }
  const SaveStats& stats() const { return stats_; }
  /// Bytes written to files so far. Any thread.
  int64_t bytes_done() const { return writer_->bytes_written() + linked_.bytes_in_use(); }
  /// What was written or linked, for the next save of the run. Only behind `finish`.
  LastSave take_saved() { return std::move(saved_); }
  /// Why files that are unchanged could not be linked; ok if they could.
  const base::Status& not_linked_because() const { return linked_.refused(); }
  /// Makes the call under way, or the next one, fail with kCancelled. Any thread.
  void cancel() { writer_->cancel(); }

 private:
  explicit SaveJob(SaveOptions options, staging::BorrowedRing ring);

  base::Status append_from_devices(std::vector<const TensorToWrite*> tensors, staging::DeviceCopies* copies);
  /// Appends a tensor record; `append_data(image, bytes, crc)` appends its elements.
  template <class AppendData>
  base::Status append_record(const std::string& fqn, const tensor::Box& box, tensor::DType dtype,
                             const AppendData& append_data);
  base::Status append_as_is(format::RecordKind kind, const std::string& fqn, const tensor::Box& box,
                            std::string_view bytes);
  /// Returns the file that takes the next record, which may be a new one.
  /// \param bytes  Of the record.
  /// \returns kUnsupported if no file may be that long.
  base::Result<FileImage*> image_for_record(int64_t bytes);
  bool is_too_long(int64_t file_bytes) const;
  bool is_enough(int64_t file_bytes) const { return enough_bytes_ > 0 && file_bytes >= enough_bytes_; }
  /// Creates the next data file.
  base::Status create_image();
  /// Returns how many of `records`, from `first` on, go into the file that is at `position`.
  base::Result<size_t> end_of_file(const std::vector<RecordToFill>& records, size_t first, int64_t position) const;
  base::Status finish_image();
  base::Status settle_if_many();
  base::Status settle_all();
  base::Status settle_finished();
  void note(const std::string& fqn, const tensor::Box& box, const format::Record& record);
  /// Notes what the record that was noted last has, for the next save.
  void note_hash(const base::ContentHash& hash, const tensor::StridedView& view);

  const SaveOptions options_;
  base::TraceLane* const lane_;  // of the calling thread; null without a trace
  staging::BorrowedRing ring_;
  base::BoundedQueue<int> free_slots_;
  // Declared after what its threads use: it is destroyed first, which joins them.
  std::vector<std::unique_ptr<FileImage>> images_;
  std::unique_ptr<io::Writer> writer_;
  io::IoDeadline deadline_;
  bool image_open_ = false;   // the last of images_ still takes records
  int64_t enough_bytes_ = 0;  // a file of that length ends; 0: no such length
  size_t num_settled_ = 0;    // how many of images_, from the first, are synced and closed
  std::vector<std::string> file_names_;
  format::RecordLayouts layouts_;
  format::WriteResult result_;
  SaveStats stats_;
  std::optional<base::ContentHasher> hasher_;
  LastSave saved_;
  LinkedFiles linked_;
};

}  // namespace bytecheckpoint::engine
