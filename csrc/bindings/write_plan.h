// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/bindings/dcp_objects.h"
#include "csrc/bindings/local_state.h"
#include "csrc/planner/save_answer.h"

namespace bytecheckpoint::bindings {

/// One item that is to be written.
struct Write {
  PlannedWrite planned;
  int64_t bytes = 0;      // of a tensor, as declared: it may resolve to another dtype
  pybind11::object item;  // of a plan made of items
  uint32_t entry = 0;     // of a plan made of a local state: of its inventory
  uint32_t box = 0;       // number of the held box in that entry
};

/// Tensors and objects apart, each in the order of the plan.
struct Writes {
  std::vector<Write> tensors, objects;
  int64_t num_bytes = 0;

  /// \returns kInvalidArgument for a tensor of an impossible shape.
  base::Status add(Write write);
};

/// What is planned of `state`. Nothing in it is Python's: needs no GIL.
base::Result<Writes> writes_of(const LocalState& state, std::vector<planner::PlannedWrite> planned);

/// What one rank writes. Needs the GIL.
class WritePlan {
 public:
  /// Of the items of a SavePlan. Raises InvalidPlanError, naming the key, for what cannot be stored.
  explicit WritePlan(const pybind11::iterable& items);

  /// \param writes  Of `state`, which is kept. \param part_class  See `make_part_item`.
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
  /// All of them, in the order of the state dict if made of one, else tensors first.
  pybind11::list items() const;
  /// Ranges of tensors of about `limit_bytes` each.
  std::vector<std::pair<size_t, size_t>> batches(int64_t limit_bytes) const;

  /// What the plan was made of; null if it was made of items.
  const LocalState* state() const { return state_.get(); }

 private:
  pybind11::object item_of(const Write& write) const;

  std::shared_ptr<const LocalState> state_;
  pybind11::object part_class_;
  Writes writes_;
};

}  // namespace bytecheckpoint::bindings
