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

/// What one rank writes: tensors and objects apart, each in the order of the plan. Needs the GIL.
class WritePlan {
 public:
  /// Of the items of a SavePlan. Raises InvalidPlanError, naming the key, for what cannot be stored.
  explicit WritePlan(const pybind11::iterable& items);

  /// What is planned of `state`, which is kept. \param part_class  See `make_part_item`.
  WritePlan(std::shared_ptr<const LocalState> state, std::vector<planner::PlannedWrite> planned,
            pybind11::object part_class);

  const std::vector<Write>& tensors() const { return tensors_; }
  const std::vector<Write>& objects() const { return objects_; }
  size_t num_items() const { return tensors_.size() + objects_.size(); }
  int64_t num_bytes() const { return num_bytes_; }

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
  void add(Write write);
  pybind11::object item_of(const Write& write) const;

  std::shared_ptr<const LocalState> state_;
  pybind11::object part_class_;
  std::vector<Write> tensors_, objects_;
  int64_t num_bytes_ = 0;
};

}  // namespace bytecheckpoint::bindings
