// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/load_job.h"
#include "csrc/engine/reading.h"
#include "csrc/planner/share_plan.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::engine {

/// A unit that this rank wants, and what it wants it for.
struct SharedUnit {
  planner::ReadSegment segment;
  uint32_t owner = 0;
  std::vector<uint32_t> wanted_by;  // ascending, this rank included
};

/// The units of a plan that `rank` wants, in its order, without what they are wanted for.
std::vector<SharedUnit> units_of(const planner::SharePlan& plan, uint32_t rank);

/// One rank's part of a load that several ranks read together, in steps: whoever calls moves the bytes between ranks.
///
///     its own units    next_own -> send slot to all who want it -> scatter -> release, when it has been sent
///     those of others  receive into a slot -> check -> scatter
///
/// Own units are read ahead, in the threads of a Reader, and handed out in order, verified. The ring is divided: slots
/// below `num_own_slots` are for reading, the others are the caller's to receive into. Takes the destinations of `job`
/// and forgets them at the end. Not thread-safe.
class SharedRun {
 public:
  /// A unit of this rank that lies in a slot.
  struct Own {
    size_t unit = 0;
    int slot = -1;
    int64_t bytes = 0;
  };

  /// \param job   Outlives the run.
  /// \param plan  Of all ranks, made of `wanted_blocks(job)` for this one.
  /// \returns kInvalidArgument for a plan without what the destinations need; kStorage without memory.
  static base::Result<std::unique_ptr<SharedRun>> start(LoadJob* job, const planner::SharePlan& plan, uint32_t rank);
  ~SharedRun();
  SharedRun(const SharedRun&) = delete;
  SharedRun& operator=(const SharedRun&) = delete;

  /// In the order in which this rank meets them; all ranks that share two units meet them in the same order.
  const std::vector<SharedUnit>& units() const { return units_; }

  int num_own_slots() const { return num_own_slots_; }
  int num_slots() const { return reading_ != nullptr ? reading_->num_slots() : 0; }
  uint8_t* slot(int index) const { return reading_->slot(index); }

  /// The next of this rank's own units, read and verified. After a failure ask no more.
  /// \param wait  Until it is read; else nothing is returned if it is not.
  base::Result<std::optional<Own>> next_own(bool wait);
  /// Compares a unit that was received with the checksums in its file, as if it had been read here.
  /// \returns kCorrupt also if its size is not what the file says.
  base::Status check(size_t unit, const uint8_t* slot, int64_t bytes);
  base::Status scatter(size_t unit, const uint8_t* slot, int64_t bytes);
  /// Hands a slot of an own unit back.
  void release(int slot) { reading_->reader().release(slot); }

  /// When all units are scattered.
  base::Result<LoadStats> finish();

 private:
  explicit SharedRun(LoadJob* job);

  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  LoadJob* const job_;
  std::vector<SharedUnit> units_;
  std::vector<size_t> own_;  // numbers of those that this rank reads
  LoadStats stats_;
  int64_t bytes_scattered_ = 0;
  int num_own_slots_ = 0;
  ReadingHolder reading_;                            // none without units
  size_t next_own_ = 0;                              // in own_
  std::unordered_map<size_t, io::FilledSlot> read_;  // by place in own_; read before their turn
};

/// The blocks that the destinations of `job` need.
base::Result<planner::WantedBlocks> wanted_blocks(LoadJob* job);

/// What numbers in an exchange refer to: equal on all ranks that look at the same checkpoint.
uint32_t digest_of(const format::Manifest& manifest);

}  // namespace bytecheckpoint::engine
