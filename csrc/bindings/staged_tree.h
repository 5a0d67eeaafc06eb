// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/index_table.h"
#include "csrc/bindings/breath.h"
#include "csrc/bindings/torch_tensor.h"
#include "csrc/bindings/tree_copy.h"
#include "csrc/staging/arena.h"
#include "csrc/staging/device_gather.h"
#include "csrc/staging/merge_pieces.h"
#include "csrc/staging/shared_device_merge.h"

namespace bytecheckpoint::bindings {

/// A state dict with tensors of its own, in host memory that it gets in the end. Needs the GIL; one thread at a time.
///
/// Made, `fill`ed, `wait`ed for, `sum`med, in this order. Host tensors come first in its memory, then those of each
/// CUDA device that DeviceMerge can copy from.
class StagedTree {
 public:
  /// Reads the state, and copies all but the elements of plain tensors in memory of the host and of such devices.
  ///
  /// \param copy_other  From a value that may change, and its key, to a copy of it in host memory.
  /// \param rewrap      From a DTensor and a local tensor to a DTensor like it.
  /// Raises InvalidPlanError, naming the key, for a tensor without memory; DeviceError.
  StagedTree(pybind11::handle state, pybind11::object copy_other, pybind11::object rewrap);
  /// Waits for what is under way.
  ~StagedTree();
  StagedTree(const StagedTree&) = delete;
  StagedTree& operator=(const StagedTree&) = delete;

  /// What `fill` takes.
  int64_t num_bytes() const { return num_bytes_; }
  /// Devices that `fill` copies from, ascending.
  std::vector<int> devices() const;

  /// Copies the elements of host tensors, and begins to copy those of tensors on devices. Without the GIL.
  /// \param lease    Of at least `num_bytes()`; the tensors keep it.
  /// \param streams  Of each of `devices()` the handle of the stream behind which its tensors are copied.
  /// Raises DeviceError; then nothing is under way.
  void fill(const std::shared_ptr<staging::Lease>& lease, int num_threads, const std::map<int, uintptr_t>& streams);

  /// Until the tensors on devices may change. Raises DeviceError, and then nothing is under way; or what a handler of a
  /// signal raises, and then it goes on.
  void wait();
  /// Ends what `fill` has begun, of a tree that nobody wants any more. Does not raise.
  void give_up();
  /// Takes the CRCs of what came from devices: from now on whoever reads it sees whether it has changed. Without the
  /// GIL. No effect a second time.
  void sum(int num_threads);

  /// Why copies from devices are slower than they could be; "" if they are not. Known after `fill`.
  const std::string& slow_because() const { return slow_because_; }
  /// As the state was; not to be looked at before `wait`.
  const pybind11::object& tree() const { return tree_; }

 private:
  /// Tensors in the memory of the host, or of one device.
  struct Place {
    std::shared_ptr<staging::SharedDeviceMerge> merge;  // of a device
    std::vector<tensor::StridedView> views;
    base::IndexTable numbers;             // of the views
    std::vector<pybind11::object> alive;  // whose memory the views are
    std::vector<staging::Piece> pieces;   // of the views
  };
  struct Staged {
    PendingTensor tensor;
    const Place* place;
    size_t view;  // of the place; fills the tensor
  };

  pybind11::object copy_leaf(pybind11::handle value);
  pybind11::object stage_tensor(pybind11::handle tensor);
  Place* place_of(pybind11::handle tensor);
  Place* place_on(int device);
  base::Status lay_out();
  base::Status fill_memory(uint8_t* first, int num_threads, const std::map<int, uintptr_t>& streams);

  const pybind11::object copy_other_, rewrap_;
  TreeCopier copier_;
  Breath breath_;
  std::map<int, Place> places_;  // the host is no device, and comes first
  std::vector<Staged> tensors_;
  int64_t num_bytes_ = 0;
  pybind11::object tree_;
  std::shared_ptr<staging::Lease> lease_;  // while devices copy to its memory, or until that is summed
  staging::DeviceGather gather_;
  staging::StagedBytes staged_;
  std::string slow_because_;
};

/// A staged state for another process: its tree without tensors, and what is to be known of them.
struct TakenApart {
  pybind11::object tree;
  std::string tensors;
};

/// \param first, bytes  The memory that the other process will have, too; tensors elsewhere stay in the tree.
/// \param stand_in      Takes the place of a tensor.
/// \param apart         From what is more than a tensor to what takes its place: a DTensor whose local tensor went to
/// the
///                      table, a tensor that is marked as parts and went there itself, or a ShardedTensor.
TakenApart take_apart(pybind11::handle tree, const uint8_t* first, int64_t bytes, pybind11::object stand_in,
                      pybind11::object apart);

/// The reverse, in the other process. \param join  From any other value that is left, and a function that gives the
/// next tensor, to what takes its place.
pybind11::object put_together(pybind11::handle tree, std::string_view tensors, std::shared_ptr<staging::Pages> pages,
                              pybind11::object stand_in, pybind11::object join);

}  // namespace bytecheckpoint::bindings
