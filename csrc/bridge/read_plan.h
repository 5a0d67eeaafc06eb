// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/bridge/checkpoint.h"
#include "csrc/bridge/dcp_objects.h"
#include "csrc/bridge/state_values.h"
#include "csrc/planner/coverage.h"

namespace bytecheckpoint::bridge {

/// One box of one stored chunk that a load wants.
struct Read {
  PlannedRead planned;
  const format::Chunk* chunk;
  const engine::RecordView* view = nullptr;  // of a chunk of a view
  // Where it goes, if the plan was made from a state dict:
  size_t state_index = 0;  // number of the value in the state
  size_t box = 0;          // number of the box in that value
  tensor::Dims to;         // where the first element goes, from the begin of that box
  pybind11::object item;   // the ReadItem: of the plan, or made at the first use
};

/// A tensor of the state whose dtype is not the stored one.
struct Cast {
  std::string fqn;
  tensor::DType from;
  pybind11::object to;  // torch.dtype
};

/// Which differences between a state and a checkpoint are errors. Shapes always are.
struct Strictness {
  bool allow_partial = false;      // leave out keys that the checkpoint does not have
  bool refuse_unexpected = false;  // if there is an error, it also names the keys that the state does not ask for
  /// Returns what is wrong with these dtypes, as a clause of the error; nothing if they may be cast.
  std::function<std::string(const std::vector<Cast>&)> refuse_casts;
};

/// What one rank reads from a checkpoint: tensors and objects separately, each in the order of the plan. It is made
/// from the items of a LoadPlan, or from a state dict. Needs the GIL.
class ReadPlan {
 public:
  /// Makes a plan from ReadItems. Raises KeyMismatchError, ShapeMismatchError or InvalidPlanError for what the
  /// checkpoint does not have.
  ReadPlan(const Checkpoint& checkpoint, const pybind11::iterable& items);

  /// Plans every box that `state` holds, from the chunks that overlap it.
  ///
  /// Raises one error with all that does not fit: KeyMismatchError if keys are missing, which also names those that the
  /// state does not ask for, else ShapeMismatchError. Shapes and dtypes are in either: tensors of another shape, those
  /// that would be loaded into something else, objects that would be loaded into a tensor with dims, complex numbers
  /// that would be loaded into real ones, casts that are refused. Raises InvalidPlanError for a box that the stored
  /// chunks do not cover.
  ReadPlan(const Checkpoint& checkpoint, std::vector<StateValue> state, const Strictness& strictness);

  /// Whether the plan was made for this checkpoint.
  bool is_of(const Checkpoint& checkpoint) const { return checkpoint_ == &checkpoint; }
  const Checkpoint& checkpoint() const { return *checkpoint_; }
  /// Returns the manifest that the plan's chunks belong to. It has at least all files, and the items that are read.
  std::shared_ptr<const format::Manifest> manifest() const {
    return part_ != nullptr ? part_ : checkpoint_->shared_whole();
  }
  size_t num_items() const { return tensors_.size() + objects_.size(); }
  const std::vector<Read>& tensors() const { return tensors_; }
  const std::vector<Read>& objects() const { return objects_; }
  /// Returns the bytes of all records that hold something wanted.
  int64_t num_bytes() const { return num_bytes_; }

  const Read& tensor_at(size_t position) const;
  const Read& object_at(size_t position) const;
  pybind11::object tensor_item(size_t position) const { return item_of(tensor_at(position)); }
  pybind11::object object_item(size_t position) const { return item_of(object_at(position)); }
  /// Returns all items, tensors first.
  pybind11::list items() const;

  /// Returns all casts, in the order of the state; none for a plan that was made from items. Tensors of which this rank
  /// holds no element are left out.
  std::vector<Cast> casts() const;

  /// Returns the positions of the objects that are to be loaded into tensors, which have no dims: numbers may be. An
  /// extra state of a module is none of them. Empty for a plan that was made from items.
  std::vector<size_t> objects_into_tensors() const;

  /// The values that the plan was made from; empty if it was made from items.
  const std::vector<StateValue>& state() const { return state_; }

 private:
  void add(Read read);
  pybind11::object item_of(const Read& read) const;
  void read_boxes(const format::Item& item, size_t state_index);

  /// Raises the errors of the constructor about keys, shapes and dtypes.
  void check_state(const Strictness& strictness) const;

  const Checkpoint* checkpoint_;
  std::shared_ptr<format::Manifest> part_;  // if the checkpoint is read in parts: items in the order of the state
  std::vector<StateValue> state_;
  std::vector<const format::Item*> item_of_state_;  // null for what the checkpoint does not have
  std::vector<Read> tensors_, objects_;
  int64_t num_bytes_ = 0;
  planner::BoxNumbers covered_;  // of the box that is being planned
};

}  // namespace bytecheckpoint::bridge
