// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "csrc/bridge/dcp_objects.h"
#include "csrc/bridge/state_values.h"
#include "csrc/planner/inventory.h"

namespace bytecheckpoint::bridge {

/// What one rank holds of a state dict: its values, and their inventory, which is sent to the coordinator. Needs the
/// GIL.
class LocalState {
 public:
  /// Raises InvalidPlanError, naming the key, for what cannot be stored.
  /// \param flat       FQN to value; the values are kept. Nobody else may change it, because the GIL is released now
  /// and then.
  /// \param mappings   FQN to the path through nested dicts; None if the state is not to be nested again.
  /// \param chunks_of  DCP's function from a tensor to its ChunkStorageMetadata.
  /// \param items_of   DCP's function from an FQN and a value to its WriteItems. It is called for values that only DCP
  /// understands.
  /// \param can_split  Whether several ranks may each write a part of one box.
  LocalState(const pybind11::dict& flat, const pybind11::object& mappings, const pybind11::object& chunks_of,
             const pybind11::object& items_of, bool can_split);

  /// For the inventory of another rank: it has no values, so that only items can be made.
  explicit LocalState(planner::Inventory inventory);
  ~LocalState();
  LocalState(const LocalState&) = delete;
  LocalState& operator=(const LocalState&) = delete;

  const planner::Inventory& inventory() const { return inventory_; }
  /// Returns the value of an entry. Not for the inventory of another rank.
  const StateValue& value_of(uint32_t entry) const { return state_[value_of_entry_[entry]]; }
  /// Returns the number that box `number` of an entry has in its value, which lists its boxes in any order.
  size_t box_in_value(uint32_t entry, uint32_t number) const {
    const auto order = orders_.find(entry);
    return order == orders_.end() ? number : order->second[number];
  }
  /// Returns the bytes of the elements of all tensors that this rank holds.
  int64_t num_bytes() const;
  /// Returns the encoded inventory. Its rank is 0, because a rank does not know its number here.
  std::string blob() const;
  /// Makes DCP's item for `part` of a box that this rank holds.
  /// \param part_class  Class of the item if that is not the whole box; see `make_part_item`.
  pybind11::object item(uint32_t entry, uint32_t number, const tensor::Box& part,
                        const pybind11::object& part_class) const;
  /// Makes all items, of whole boxes, as DCP's own planner lists them.
  pybind11::list items() const;

 private:
  /// What the inventory says about a value, besides the boxes that are held.
  struct Declared {
    bool is_here = true;  // false: only other ranks have it
    planner::EntryKind kind = planner::EntryKind::kBytes;
    tensor::TensorInfo info;
    std::string path;
  };

  class Paths;
  static Declared declare(Paths* paths, const pybind11::object& items_of, StateValue* state_value);
  base::Status take_inventory(const std::vector<Declared>& declared, bool can_split);
  static planner::EntryKind ask_dcp(const pybind11::object& items_of, StateValue* state_value,
                                    tensor::TensorInfo* info);

  std::vector<StateValue> state_;
  std::vector<size_t> value_of_entry_;
  std::unordered_map<uint32_t, std::vector<size_t>> orders_;  // of the entries in chunks
  planner::Inventory inventory_;
};

}  // namespace bytecheckpoint::bridge
