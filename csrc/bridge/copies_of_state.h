// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/bridge/local_state.h"
#include "csrc/planner/copies.h"

namespace bytecheckpoint::bridge {

/// What Python says about values, for `CopiesOfState`.
struct CopyQuestions {
  pybind11::object mesh_of;      // sharded tensor to the number of its mesh or group; 1: all ranks are in it
  pybind11::object shards_of;    // sharded tensor that only DCP understands to its local tensors, in DCP's order
  pybind11::object checksum_of;  // object to a checksum of its bytes, or None
};

/// What one rank holds of which other ranks may hold copies that torch does not keep equal; see planner/copies.h.
class CopiesOfState {
 public:
  /// \param compares  Whether to compute checksums; otherwise the copies only name their meshes.
  /// \param seed      Draws the blocks of large tensors that are looked at. Ranks with other seeds look at other
  /// blocks, so that these are not compared. Needs the GIL.
  CopiesOfState(const LocalState& state, const CopyQuestions& questions, bool compares, uint64_t seed);

  /// Returns the message for the coordinator: the inventory, and the copies if there are any. Needs no GIL.
  std::string message(std::string_view inventory) const;
  /// Returns what a plan depends on: names of meshes.
  std::string meshes() const;
  /// Whether any copy has a checksum. If not, the message is the same as long as `meshes` is.
  bool has_checksums() const;
  /// See planner::hashes_of_groups.
  base::Result<std::string> hashes_of_groups(std::string_view groups) const {
    return planner::hashes_of_groups(copies_, groups);
  }

 private:
  std::vector<planner::HeldCopy> copies_;
};

}  // namespace bytecheckpoint::bridge
