// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace bytecheckpoint::base {

/// Places where a test build can be killed or held: BCP_FAILPOINT=name in the environment (name:3 for the third time)
/// raises SIGKILL there; name=stop, or name:3=stop, raises SIGSTOP, and the process goes on when it gets SIGCONT. Other
/// builds contain nothing of it.
enum class Failpoint : uint8_t {
  kBeginDirectoryMade,  // one of the directories that were missing exists, its name not synced
  kBeginDirectory,      // all exist
  kBeginTmpCreated,     // our tmp exists, not locked
  kBeginLocked,         // and is locked
  kBeginLooked,         // no other save lives
  kBeginSwept,          // what dead saves left is gone, no space reserved yet
  kBeginDone,           // reserved
  kWriteFileCreated,    // a data file exists, empty
  kWriteFileReserved,   // and has space beyond its end
  kWriteRecordsDone,    // its records are laid out, block table and trailer are not
  kWriteData,           // a slot was written
  kWriteDataDone,       // all bytes were written, not synced
  kWriteFileCut,        // a file has its final size, not synced
  kWriteFileSynced,     // one file is durable, others may not be
  kWriteFilesSynced,
  kWriteDirectorySynced,   // this rank's part is durable
  kCommitChecked,          // coordinator has seen all files
  kCommitMetadataFilled,   // into the tmp, which is as long as what was reserved
  kCommitMetadataWritten,  // and has its final size
  kCommitMetadataSynced,
  kCommitDecided,  // the right was looked at for the last time
  kCommitRenamed,
  kCommitDirectorySynced,
  kRankMetadataRemoved,  // of a rank that saved without collectives before
  kSweepListed,
  kSweepTmpRemoved,
  kSweepDirectorySynced,
  kSweepFileRemoved,
  kAbortTmpRemoved,  // the right is gone, the files are there
  kAbortFileRemoved,
  kCommitDone,
};

inline constexpr const char* kFailpointNames[] = {
    "begin_directory_made",
    "begin_directory",
    "begin_tmp_created",
    "begin_locked",
    "begin_looked",
    "begin_swept",
    "begin_done",
    "write_file_created",
    "write_file_reserved",
    "write_records_done",
    "write_data",
    "write_data_done",
    "write_file_cut",
    "write_file_synced",
    "write_files_synced",
    "write_directory_synced",
    "commit_checked",
    "commit_metadata_filled",
    "commit_metadata_written",
    "commit_metadata_synced",
    "commit_decided",
    "commit_renamed",
    "commit_directory_synced",
    "rank_metadata_removed",
    "sweep_listed",
    "sweep_tmp_removed",
    "sweep_directory_synced",
    "sweep_file_removed",
    "abort_tmp_removed",
    "abort_file_removed",
    "commit_done",
};

#if defined(BCP_FAILPOINTS)
void hit_failpoint(Failpoint point);
#define BCP_FAILPOINT(point) ::bytecheckpoint::base::hit_failpoint(::bytecheckpoint::base::Failpoint::point)
#else
#define BCP_FAILPOINT(point) static_cast<void>(0)
#endif

}  // namespace bytecheckpoint::base
