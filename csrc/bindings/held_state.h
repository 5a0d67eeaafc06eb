// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "csrc/bindings/torch_tensor.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::bindings {

/// One value of a flat state dict, as planning sees it.
struct HeldValue {
  enum class Kind {
    kObject,   // not a tensor
    kPlain,    // a torch.Tensor or Parameter: held whole
    kDTensor,  // one box of it is held, in a plain tensor of its own; none by ranks outside its mesh
    kChunks,   // any boxes of it are held, each in a plain tensor: LocalChunks, and tensors that are marked as parts
    kOther,    // ShardedTensor, subclasses, tensors whose elements need torch.save: DCP knows what is held
  };

  std::string fqn;
  pybind11::object key;  // the same, as it is in the state
  Kind kind = Kind::kObject;
  TensorFacts facts;               // of the whole tensor; unless kObject or kOther
  std::vector<tensor::Box> boxes;  // held here, of the whole tensor; unless kObject
  pybind11::object value;
  std::vector<pybind11::object> items;  // DCP's, of kOther in a plan to save

  /// The tensor whose memory is the box of that number: the value itself, or what it wraps. Unless kObject or kOther.
  pybind11::object local(size_t box) const;
};

/// A DTensor itself, no subclass of it?
bool is_dtensor(pybind11::handle value);
/// What a DTensor wraps.
pybind11::object local_of(pybind11::handle dtensor);
/// A LocalChunks?
bool is_local_chunks(pybind11::handle value);
/// Its tensors: a tuple, one a box.
pybind11::tuple tensors_of_chunks(pybind11::handle chunks);

/// Is it still the value of its name?
bool is_still(const HeldValue& held, const pybind11::dict& flat);

/// Reads the values of flat state dicts. Boxes of DTensors are computed once for each shape and placement: DCP takes
/// tens of microseconds for one. Needs the GIL.
class StateScanner {
 public:
  /// \param chunks_of  DCP's function from a tensor to a list of ChunkStorageMetadata.
  explicit StateScanner(pybind11::object chunks_of) : chunks_of_(std::move(chunks_of)) {}

  /// In the order of `flat`, which nobody may change meanwhile: the GIL is let go now and then. Raises what DCP raises
  /// for tensors that have no chunks, as those with partial placements.
  std::vector<HeldValue> scan(const pybind11::dict& flat);

 private:
  void read_tensor(HeldValue* held);
  void read_chunks(HeldValue* held);
  void read_parts(HeldValue* held);
  const std::vector<tensor::Box>& boxes_of_dtensor(pybind11::handle dtensor);
  std::vector<tensor::Box> ask_dcp(pybind11::handle tensor) const;

  const pybind11::object chunks_of_;
  pybind11::dict known_;  // (mesh, placements, shape) to a position in boxes_
  std::vector<std::vector<tensor::Box>> boxes_;
};

/// Are there values that DCP prepares before it plans?
struct Peculiarities {
  bool has_sharded_tensor = false;
  bool has_meta_tensor = false;
};
Peculiarities find_peculiarities(const pybind11::dict& flat);

}  // namespace bytecheckpoint::bindings
