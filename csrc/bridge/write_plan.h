// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/bridge/dcp_objects.h"
#include "csrc/bridge/local_state.h"
#include "csrc/planner/rank_assignment.h"

namespace bytecheckpoint::bridge {

/// One item to write.
struct Write {
  WriteItemFields planned;
  int64_t bytes = 0;      // of a tensor, as declared: the planner may resolve it to another dtype
  pybind11::object item;  // in a plan made from items
  uint32_t entry = 0;     // in a plan made from a local state: the entry in its inventory
  uint32_t box = 0;       // the number of the held box in that entry
};

/// Tensors and objects separately, each in the order of the plan.
struct Writes {
  std::vector<Write> tensors, objects;
  int64_t num_bytes = 0;

  /// Adds an item. \returns kInvalidArgument for a tensor of an impossible shape.
  base::Status add(Write write);
};

/// Returns the items to write for the planned boxes of `state`. It reads no Python objects, so it needs no GIL.
base::Result<Writes> writes_of(const LocalState& state, std::vector<planner::PlannedWrite> planned);

/// What one rank writes. It is made from the items of a SavePlan, or from a LocalState and an assignment. Needs the
/// GIL.
class WritePlan {
 public:
  /// Makes a plan from the items of a SavePlan. Raises InvalidPlanError, naming the key, for what cannot be stored.
  explicit WritePlan(const pybind11::iterable& items);

  /// \param writes      From `writes_of(state, ...)`; `state` is kept.
  /// \param part_class  See `make_part_item`.
  WritePlan(std::shared_ptr<const LocalState> state, Writes writes, pybind11::object part_class)
      : state_(std::move(state)), part_class_(std::move(part_class)), writes_(std::move(writes)) {}
  ~WritePlan();
  WritePlan(const WritePlan&) = delete;
  WritePlan& operator=(const WritePlan&) = delete;

  const std::vector<Write>& tensors() const { return writes_.tensors; }
  const std::vector<Write>& objects() const { return writes_.objects; }
  size_t num_items() const { return tensors().size() + objects().size(); }
  int64_t num_bytes() const { return writes_.num_bytes; }

  const Write& tensor_at(size_t position) const;
  const Write& object_at(size_t position) const;
  pybind11::object tensor_item(size_t position) const { return item_of(tensor_at(position)); }
  pybind11::object object_item(size_t position) const { return item_of(object_at(position)); }
  /// Returns all items: in the order of the state dict if the plan was made from one, else tensors first.
  pybind11::list items() const;
  /// Divides the tensors into ranges of about `limit_bytes` each.
  std::vector<std::pair<size_t, size_t>> batches(int64_t limit_bytes) const;

  /// The state that the plan was made from; null if it was made from items.
  const LocalState* state() const { return state_.get(); }

 private:
  pybind11::object item_of(const Write& write) const;

  std::shared_ptr<const LocalState> state_;
  pybind11::object part_class_;
  Writes writes_;
};

}  // namespace bytecheckpoint::bridge
