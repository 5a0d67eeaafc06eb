// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "csrc/bindings/dcp_objects.h"
#include "csrc/bindings/held_state.h"
#include "csrc/planner/inventory.h"

namespace bytecheckpoint::bindings {

/// What one rank holds of a state dict: its values, and the inventory of them that travels. Needs the GIL.
class LocalState {
 public:
  /// \param flat      FQN to value; the values are kept. Nobody else has it: the GIL is let go now and then.
  /// \param mappings  FQN to the way through nested dicts, or none if the state is not to be nested again.
  /// \param items_of  DCP's function from an FQN and a value to its WriteItems, asked for what only DCP understands.
  /// \param can_split  May several ranks write parts of one box?
  /// Raises InvalidPlanError, naming the key, for what cannot be stored.
  LocalState(const pybind11::dict& flat, const pybind11::object& mappings, const pybind11::object& chunks_of,
             const pybind11::object& items_of, bool can_split);

  /// Of another rank: without values, so that only items can be made.
  explicit LocalState(planner::Inventory inventory);
  ~LocalState();
  LocalState(const LocalState&) = delete;
  LocalState& operator=(const LocalState&) = delete;

  const planner::Inventory& inventory() const { return inventory_; }
  /// Not of another rank's.
  const HeldValue& held(uint32_t entry) const { return state_[held_of_entry_[entry]]; }
  /// Of the elements of all tensors that are held.
  int64_t num_bytes() const;
  /// The inventory as it travels. A rank does not know its number: in its blob it is 0.
  std::string blob() const;
  /// DCP's item for `part` of a box that is held.
  /// \param part_class  Class of the item if that is not the whole box; see `make_part_item`.
  pybind11::object item(uint32_t entry, uint32_t number, const tensor::Box& part,
                        const pybind11::object& part_class) const;
  /// All items, whole, as DCP's own planner would list them.
  pybind11::list items() const;

 private:
  /// What the inventory says of a value, besides what is held of it.
  struct Declared {
    bool is_here = true;  // else other ranks have it
    planner::EntryKind kind = planner::EntryKind::kBytes;
    tensor::TensorInfo info;
    std::string path;
  };

  static Declared declare(const pybind11::object& mappings, const pybind11::object& items_of, HeldValue* held);
  base::Status take_inventory(const std::vector<Declared>& declared, bool can_split);
  static planner::EntryKind ask_dcp(const pybind11::object& items_of, HeldValue* held, tensor::TensorInfo* info);

  std::vector<HeldValue> state_;
  std::vector<size_t> held_of_entry_;
  planner::Inventory inventory_;
};

}  // namespace bytecheckpoint::bindings
