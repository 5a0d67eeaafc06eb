// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/base/trace.h"
#include "csrc/engine/load/load_job.h"
#include "csrc/engine/load/read_pipeline.h"
#include "csrc/engine/load/shared_memory.h"
#include "csrc/planner/share_plan.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::engine {

/// A segment that this rank wants. One rank, the owner, reads it and sends it to all others that want it.
struct SharedUnit {
  planner::ReadSegment segment;
  uint32_t owner = 0;
  std::vector<uint32_t> wanted_by;  // ascending, this rank included
};

/// Returns the units of a plan that `rank` wants, in the order of the plan. Their `segment.wanted` is empty.
std::vector<SharedUnit> units_of(const planner::SharePlan& plan, uint32_t rank);

/// One rank's part of a load in which several ranks read each block once. It goes in steps: the caller moves messages
/// between ranks.
///
///     own units      next_own -> send or announce the slot to all who want it -> scatter -> release, once all have it
///     other units    receive into a slot -> check -> scatter
///     ... of ranks whose memory is open: nothing to receive; check -> scatter, from the owner's own slot
///
///     ring   | slots 0 .. num_own_slots - 1       | num_own_slots .. num_slots - 1                       |
///            | the Reader's threads fill them     | the caller receives into them; none if nothing comes |
///
/// Own units are read ahead by the threads of a `Reader`, and handed out in order, verified. The run fills the first
/// phase of the destinations of `job`, and forgets it at the end; after a failure, all of them. Not thread-safe.
class SharedRun {
 public:
  /// An own unit that was read into a slot.
  struct Own {
    size_t unit = 0;
    int slot = -1;
    int64_t bytes = 0;
  };

  /// \param job   Must outlive the run.
  /// \param plan  Of all ranks, made from `wanted_blocks(job)` of each of them.
  /// \param memory  With the rings of peers; must outlive the run. Null: all units come as messages.
  /// \returns kInvalidArgument if the plan lacks blocks that the destinations need. kStorage if there is no memory.
  static base::Result<std::unique_ptr<SharedRun>> start(LoadJob* job, const planner::SharePlan& plan, uint32_t rank,
                                                        SharedMemory* memory = nullptr);
  ~SharedRun();
  SharedRun(const SharedRun&) = delete;
  SharedRun& operator=(const SharedRun&) = delete;

  /// In the order in which this rank handles them. Any two ranks that share two units handle these in the same order.
  const std::vector<SharedUnit>& units() const { return units_; }

  /// Slots [0, num_own_slots()) are for own units, [num_own_slots(), num_slots()) for received ones.
  int num_own_slots() const { return num_own_slots_; }
  int num_slots() const { return reading_ != nullptr ? reading_->num_slots() : 0; }
  uint8_t* slot(int index) const { return reading_->slot(index); }
  /// Returns the memory of a unit: slot `index` of its owner if that is open, else of this rank. Null if there is no
  /// such unit or slot.
  const uint8_t* memory_of(size_t unit, int index) const;

  /// Returns the next own unit, read and verified; nothing if there is none left. Do not call it again after a failure.
  /// \param wait  true: block until it is read. false: return nothing if it is not read yet.
  base::Result<std::optional<Own>> next_own(bool wait);
  /// Compares a received unit with the checksums in its file, as if it had been read here.
  /// \param is_verified  The owner has compared these very bytes of memory: compares the size alone.
  /// \returns kCorrupt, also if its size is not what the file says.
  base::Status check(size_t unit, const uint8_t* slot, int64_t bytes, bool is_verified = false);
  /// Copies what this rank wants of a checked unit to its destinations.
  base::Status scatter(size_t unit, const uint8_t* slot, int64_t bytes);
  /// Gives the slot of an own unit back, to be filled again.
  void release(int slot) { reading_->reader().release(slot); }

  /// Ends the run; call it when all units are scattered. If `Destinations` have another phase, the next run fills that.
  /// \returns kCorrupt if the checksum of an archive is wrong.
  base::Result<LoadStats> finish();

 private:
  SharedRun(LoadJob* job, uint32_t rank, const SharedMemory* memory);

  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  LoadJob* const job_;
  const uint32_t rank_;
  const SharedMemory* const memory_;
  base::TraceLane* const lane_;
  std::vector<SharedUnit> units_;
  std::vector<size_t> own_;  // positions of the own units
  LoadStats stats_;
  int64_t bytes_scattered_ = 0;
  int num_own_slots_ = 0;
  bool is_finished_ = false;
  ReadPipelineHolder reading_;                       // null if there are no units
  size_t next_own_ = 0;                              // in own_
  std::unordered_map<size_t, io::FilledSlot> read_;  // by position in own_: read before their turn
};

/// Returns the blocks that the destinations of `job` need.
planner::WantedBlocks wanted_blocks(LoadJob* job);

/// Returns a digest of the save id and the files of a manifest. Ranks compare it before an exchange, because numbers of
/// files in the exchange must mean the same on all of them.
uint32_t digest_of(const format::Manifest& manifest);

}  // namespace bytecheckpoint::engine
