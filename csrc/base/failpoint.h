// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace bytecheckpoint::base {

/// Places in a save at which tests can kill or stop the process.
///
/// In a build with BCP_FAILPOINTS, the environment variable BCP_FAILPOINT selects one place by its name in
/// kFailpointNames:
///
///     BCP_FAILPOINT=name         raises SIGKILL when the place is reached for the first time
///     BCP_FAILPOINT=name:3       raises SIGKILL when it is reached for the third time
///     BCP_FAILPOINT=name=stop    raises SIGSTOP instead; the process goes on after SIGCONT. Also name:3=stop.
///
/// Other builds contain none of this code. Each comment below says what is true when the place is reached.
enum class Failpoint : uint8_t {
  kBeginDirectoryMade,     // one of the missing directories exists now, its name is not synced
  kBeginDirectory,         // all directories exist
  kBeginTmpCreated,        // our tmp file exists, but is not locked
  kBeginLocked,            // our tmp file is locked
  kBeginLooked,            // no other save is running here
  kBeginSwept,             // files that dead saves left are removed; no space is reserved
  kBeginDone,              // space for the metadata is reserved
  kWriteFileCreated,       // a data file exists and is empty
  kWriteFileReserved,      // the first data file has its space reserved
  kWriteRecordsDone,       // all records of a file are laid out, its block table and trailer are not
  kWriteData,              // one slot was written
  kWriteDataDone,          // all bytes were written, none synced
  kWriteFileCut,           // a file has its final size, but is not synced
  kWriteFileSynced,        // one file is durable, others may not be
  kWriteFilesSynced,       // all files of this rank are durable
  kWriteDirectorySynced,   // their names are durable, too: this rank is done
  kCommitChecked,          // the coordinator has checked all files
  kCommitMetadataFilled,   // the tmp file has the metadata, and still the reserved length
  kCommitMetadataWritten,  // the tmp file has its final size
  kCommitMetadataSynced,   // the tmp file is durable
  kCommitDecided,          // the right to commit was checked for the last time
  kCommitRenamed,          // .metadata is in place: the checkpoint is committed
  kCommitDirectorySynced,  // the commit is durable
  kRankMetadataRemoved,    // the metadata file of one rank of an earlier save without collectives is removed
  kSweepListed,            // the directory was listed, nothing removed
  kSweepTmpRemoved,        // one tmp file of a dead save was looked at, and removed
  kSweepDirectorySynced,   // the directory is synced, no data file is removed yet
  kSweepFileRemoved,       // one data file is removed
  kAbortTmpRemoved,        // an aborted save has given up its right to commit; its files are there
  kAbortFileRemoved,       // one of its files is removed
  kCommitDone,             // the sweep after the commit is over
};

/// Names of the enumerators of Failpoint, in their order.
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
/// Raises the signal if the environment selects `point` and this is the hit that it asks for.
void hit_failpoint(Failpoint point);
#define BCP_FAILPOINT(point) ::bytecheckpoint::base::hit_failpoint(::bytecheckpoint::base::Failpoint::point)
#else
#define BCP_FAILPOINT(point) static_cast<void>(0)
#endif

}  // namespace bytecheckpoint::base
