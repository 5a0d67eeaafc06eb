// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "csrc/bridge/ordered_lookup.h"
#include "csrc/bridge/torch_tensor.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::bridge {

/// One value of a flat state dict, and which boxes of it this rank holds.
struct StateValue {
  enum class Kind {
    kObject,   // not a tensor
    kPlain,    // a torch.Tensor or Parameter, held whole
    kDTensor,  // one box of it is state_value, in a plain tensor; none on ranks outside its mesh
    kChunks,   // any boxes are state_value, each in a plain tensor: LocalChunks, and tensors marked as parts
    kOther,    // ShardedTensor, subclasses, tensors that need torch.save: only DCP knows what is state_value
  };

  std::string fqn;
  pybind11::object key;  // the FQN, as the object in the state
  Kind kind = Kind::kObject;
  TensorFacts facts;               // of the whole tensor; not for kObject and kOther
  std::vector<tensor::Box> boxes;  // boxes of the whole tensor that this rank holds; not for kObject
  pybind11::object value;
  std::vector<pybind11::object> items;  // DCP's WriteItems, for kOther in a plan to save

  /// Returns the tensor whose memory is box number `box`: the value itself, or what it wraps. Not for kObject and
  /// kOther.
  pybind11::object local(size_t box) const;
};

/// Whether the value is a DTensor, and not of a subclass.
bool is_dtensor(pybind11::handle value);
/// Returns the local tensor of a DTensor.
pybind11::object local_of(pybind11::handle dtensor);
/// Whether the value is a `LocalChunks`.
bool is_local_chunks(pybind11::handle value);
/// Returns the tensors of a `LocalChunks`, one for each box.
pybind11::tuple tensors_of_chunks(pybind11::handle chunks);

/// Whether the state still has this value under its name.
inline bool is_still(const StateValue& state_value, OrderedLookup* flat) {
  return flat->find(state_value.key.ptr()) == state_value.value.ptr();
}

/// Reads the values of flat state dicts. The boxes of DTensors are computed once for each mesh, placement and shape,
/// because DCP takes tens of microseconds for one. Needs the GIL.
class StateScanner {
 public:
  enum class Use { kRead, kFill };

  /// \param chunks_of  DCP's function from a tensor to a list of ChunkStorageMetadata.
  /// \param use  What will be done with the memory of the tensors.
  StateScanner(pybind11::object chunks_of, Use use);

  /// Reads all values, in the order of `flat`. Nobody may change `flat` meanwhile, because the GIL is released now and
  /// then. Raises what DCP raises for tensors that have no chunks, like those with partial placements, and
  /// InvalidPlanError for a tensor that is to be filled, and is not inside its storage or cannot be written to.
  std::vector<StateValue> scan(const pybind11::dict& flat);

 private:
  void read_tensor(StateValue* state_value);
  void read_chunks(StateValue* state_value);
  void read_parts(StateValue* state_value);
  const std::vector<tensor::Box>& boxes_of_dtensor(pybind11::handle dtensor, const tensor::Dims& sizes);
  /// Appends what tells a placement from all others that are not equal to it.
  void add_placement(pybind11::handle placement, std::vector<int64_t>* key);
  std::vector<tensor::Box> ask_dcp(pybind11::handle tensor) const;

  void check(const StateValue& state_value, pybind11::handle tensor);

  const pybind11::object chunks_of_;
  std::optional<base::ReadOnlyMemory> read_only_;  // if the tensors are filled
  pybind11::dict placements_;                      // placements other than Shard and Replicate, to a number of each
  std::map<std::vector<int64_t>, std::vector<tensor::Box>> known_;  // boxes by mesh, placements and sizes
};

/// The values of a state that are prepared before it is planned.
struct SpecialTensors {
  bool has_sharded_tensor = false;
  bool has_meta_tensor = false;
  pybind11::list subclasses;  // keys of tensors of subclasses, and of DTensors whose local tensor is of one
  pybind11::list copies;      // keys of `LocalChunks` that must agree with those of other ranks
};
SpecialTensors find_special_tensors(const pybind11::dict& flat);

}  // namespace bytecheckpoint::bridge
