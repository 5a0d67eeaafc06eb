// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/bindings/bind_checkpoint.h"
#include "csrc/bindings/dcp_objects.h"
#include "csrc/bindings/held_state.h"
#include "csrc/planner/coverage.h"

namespace bytecheckpoint::bindings {

/// One box of one stored chunk that is wanted.
struct Read {
  PlannedRead planned;
  const format::Chunk* chunk;
  // Of a plan made of a state dict: where it goes.
  size_t held = 0;        // position of the value in the state
  size_t box = 0;         // which of its boxes
  tensor::Dims to;        // of the first element, from the begin of that box
  pybind11::object item;  // the ReadItem: that of the plan, or made when somebody looks
};

/// What one rank reads of a checkpoint: tensors and objects apart, each in the order of the plan.
///
/// Made of the items of a LoadPlan, or of a state dict. Needs the GIL.
class ReadPlan {
 public:
  /// Raises KeyMismatchError, ShapeMismatchError or InvalidPlanError for what the checkpoint does not have.
  ReadPlan(const Checkpoint& checkpoint, const pybind11::iterable& items);

  /// Every box that `state` holds, of the chunks that overlap it.
  ///
  /// \param allow_partial  Leave out keys that the checkpoint does not have.
  /// Raises KeyMismatchError with all keys that are missing and all that nobody asks for; ShapeMismatchError with all
  /// tensors of another shape; InvalidPlanError for a tensor that is to be loaded into something else, complex numbers
  /// into real ones, or a box that the stored chunks do not cover.
  ReadPlan(const Checkpoint& checkpoint, std::vector<HeldValue> state, bool allow_partial);

  bool is_of(const Checkpoint& checkpoint) const { return checkpoint_ == &checkpoint; }
  /// What the plan's chunks are of: at least all files, and the items that are read.
  std::shared_ptr<const format::Manifest> manifest() const {
    return part_ != nullptr ? part_ : checkpoint_->shared_whole();
  }
  size_t num_items() const { return tensors_.size() + objects_.size(); }
  const std::vector<Read>& tensors() const { return tensors_; }
  const std::vector<Read>& objects() const { return objects_; }
  /// Of the records that hold what is wanted.
  int64_t num_bytes() const { return num_bytes_; }

  const Read& tensor_at(size_t position) const;
  const Read& object_at(size_t position) const;
  pybind11::object tensor_item(size_t position) const { return item_of(tensor_at(position)); }
  pybind11::object object_item(size_t position) const { return item_of(object_at(position)); }
  /// All of them, tensors first.
  pybind11::list items() const;

  /// Values that the plan was made of; none if it was made of items.
  const std::vector<HeldValue>& state() const { return state_; }

 private:
  void add(Read read);
  pybind11::object item_of(const Read& read) const;
  void read_boxes(const format::Item& item, size_t held);

  /// Raises what the constructor raises for keys and shapes.
  void check_state(const std::vector<const format::Item*>& items, bool allow_partial) const;

  const Checkpoint* checkpoint_;
  std::shared_ptr<format::Manifest> part_;  // of a checkpoint that is read in parts: items in the order of the state
  std::vector<HeldValue> state_;
  std::vector<Read> tensors_, objects_;
  int64_t num_bytes_ = 0;
  planner::BoxNumbers covered_;  // of the box that is planned just now
};

}  // namespace bytecheckpoint::bindings
