// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/index_table.h"
#include "csrc/bridge/gil_yield.h"
#include "csrc/bridge/torch_tensor.h"
#include "csrc/bridge/tree_copy.h"
#include "csrc/staging/arena.h"
#include "csrc/staging/device_copies.h"
#include "csrc/staging/device_transfers.h"
#include "csrc/staging/merge_pieces.h"
#include "csrc/staging/shared_device_merge.h"

namespace bytecheckpoint::bridge {

/// A copy of a state dict, whose tensors get host memory only when it is filled. Needs the GIL; one thread at a time.
///
///     StagedTree(state) -> fill(lease) -> wait() -> checksum()
///
///     memory of the lease   | host tensors | tensors of cuda:0 | tensors of cuda:1 | ...
///
/// Tensors of a CUDA device are filled by DeviceMerge, if it works there. Tied tensors are stored once.
class StagedTree {
 public:
  /// Copies the state, except the elements of plain tensors in host memory and on such devices.
  ///
  /// Raises InvalidPlanError, naming the key, for a tensor without memory. DeviceError.
  /// \param copy_other  Function from a value that may change, and its key, to a copy of it in host memory.
  /// \param rewrap      Function from a DTensor and a local tensor to a DTensor like it.
  /// \param parts_of    Function from a tensor that is not plain, and its key, to a dict that is staged in its place,
  /// or None.
  StagedTree(pybind11::handle state, pybind11::object copy_other, pybind11::object rewrap, pybind11::object parts_of);
  /// Waits for copies under way.
  ~StagedTree();
  StagedTree(const StagedTree&) = delete;
  StagedTree& operator=(const StagedTree&) = delete;

  /// Returns the bytes of memory that `fill` needs.
  int64_t num_bytes() const { return num_bytes_; }
  /// Returns the CUDA devices that `fill` copies from, ascending.
  std::vector<int> devices() const;

  /// Copies the elements of host tensors, and begins to copy those of tensors on devices. Releases the GIL. Raises
  /// DeviceError; then nothing is under way.
  /// \param lease    Has at least `num_bytes()` bytes; the tensors keep it.
  /// \param streams  For each of `devices()`, the handle of the stream behind whose work its tensors are copied.
  /// \param has_hashes  Whether hashes of the tensors are computed with the CRCs; see `base::ContentHash`.
  void fill(const std::shared_ptr<staging::Lease>& lease, int num_threads, const std::map<int, uintptr_t>& streams,
            bool has_hashes);

  /// Waits until the tensors on devices are copied, and may change again. Raises DeviceError, and then nothing is under
  /// way; or what a handler of a signal raises, and then the copies go on.
  void wait();
  /// Waits for what `fill` has begun, for a tree that nobody wants any more. Does not raise.
  void give_up();
  /// Computes the CRCs of what came from devices: from then on a save can tell whether it has changed. Releases the
  /// GIL. No effect the second time.
  void checksum(int num_threads);

  /// Returns why copies from devices are slower than they could be; "" if they are not. Known after `fill`.
  const std::string& slow_because() const { return slow_because_; }
  /// Returns the copy of the state. Do not read it before `wait` has returned.
  const pybind11::object& tree() const { return tree_; }

 private:
  /// The tensors in host memory, or on one device.
  struct Place {
    std::shared_ptr<staging::SharedDeviceMerge> merge;  // null for the host
    std::vector<tensor::StridedView> views;
    base::IndexTable numbers;             // of the views
    std::vector<pybind11::object> alive;  // keeps the tensors that the views are of
    std::vector<staging::Piece> pieces;   // of the views
  };
  struct Staged {
    PendingTensor tensor;
    const Place* place;
    size_t view;  // number of the view in the place that fills the tensor
  };

  pybind11::object copy_leaf(pybind11::handle value);
  pybind11::object stage_tensor(pybind11::handle tensor);
  Place* place_of(pybind11::handle tensor);
  Place* place_on(int device);
  base::Status lay_out();
  void check_memories() const;
  base::Status fill_memory(uint8_t* first, int num_threads, const std::map<int, uintptr_t>& streams);

  const pybind11::object copy_other_, rewrap_, parts_of_;
  TreeCopier copier_;
  GilYield gil_yield_;
  std::map<int, Place> places_;  // by device number; the host is -1, and so comes first
  std::vector<Staged> tensors_;
  int64_t num_bytes_ = 0;
  pybind11::object tree_;
  std::shared_ptr<staging::Lease> lease_;  // kept while devices copy to its memory, or until CRCs are computed
  staging::DeviceTransfers gather_;
  staging::StagedBytes staged_;
  bool has_hashes_ = false;
  std::string slow_because_;
};

/// A staged state for another process: its tree without tensors, and a table of the tensors.
struct SplitState {
  pybind11::object tree;
  std::string tensors;
};

/// Divides a staged state into its tree and a table of its tensors. Needs the GIL.
/// \param first, bytes  The memory that the other process will also map; tensors elsewhere stay in the tree.
/// \param stand_in      Takes the place of a tensor in the tree.
/// \param apart         Function from a value that is more than a plain tensor to what takes its place: a DTensor whose
/// local tensor is in the table, a tensor that is marked as parts and is in the table itself, or a ShardedTensor.
SplitState take_apart(pybind11::handle tree, const uint8_t* first, int64_t bytes, pybind11::object stand_in,
                      pybind11::object apart);

/// The reverse, in the other process.
/// \param join  Function from any other value in the tree, and a function that returns the next tensor, to what takes
/// its place.
pybind11::object put_together(pybind11::handle tree, std::string_view tensors, std::shared_ptr<staging::Pages> pages,
                              pybind11::object stand_in, pybind11::object join);

}  // namespace bytecheckpoint::bridge
