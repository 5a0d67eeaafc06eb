// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/bindings/breath.h"
#include "csrc/bindings/torch_tensor.h"
#include "csrc/bindings/tree_copy.h"
#include "csrc/staging/arena.h"
#include "csrc/staging/merge_pieces.h"

namespace bytecheckpoint::bindings {

/// A state dict with tensors of its own, in memory that it gets in the end. Needs the GIL.
class StagedTree {
 public:
  /// Reads the state, and copies all but the elements of plain tensors in host memory.
  ///
  /// \param copy_other  From a value that may change, and its key, to a copy of it in host memory.
  /// \param rewrap      From a DTensor and a local tensor to a DTensor like it.
  /// Raises InvalidPlanError, naming the key, for a tensor without memory.
  StagedTree(pybind11::handle state, pybind11::object copy_other, pybind11::object rewrap);

  /// What `fill` takes.
  int64_t num_bytes() const { return num_bytes_; }
  /// Copies the elements, without the GIL. \param lease  Of at least `num_bytes()`; the tensors keep it.
  void fill(const std::shared_ptr<staging::Lease>& lease, int num_threads);
  /// As the state was; not to be looked at before `fill`.
  const pybind11::object& tree() const { return tree_; }

 private:
  pybind11::object copy_leaf(pybind11::handle value);
  pybind11::object stage_tensor(pybind11::handle tensor);
  size_t view_number(const tensor::StridedView& view);

  const pybind11::object copy_other_, rewrap_;
  TreeCopier copier_;
  Breath breath_;
  std::vector<std::pair<PendingTensor, size_t>> tensors_;  // and the number of the view that fills each
  std::vector<tensor::StridedView> views_;
  std::vector<pybind11::object> alive_;  // whose memory the views are
  std::unordered_map<const uint8_t*, std::vector<size_t>> views_at_;
  std::vector<staging::Piece> pieces_;  // of the views
  int64_t num_bytes_ = 0;
  pybind11::object tree_;
};

/// A staged state for another process: its tree without tensors, and what is to be known of them.
struct TakenApart {
  pybind11::object tree;
  std::string tensors;
};

/// \param first, bytes   The memory that the other process will have, too; tensors elsewhere stay in the tree.
/// \param stand_in       Takes the place of a tensor.
/// \param apart_dtensor  From a DTensor to what takes its place; its local tensor goes to the table.
TakenApart take_apart(pybind11::handle tree, const uint8_t* first, int64_t bytes, pybind11::object stand_in,
                      pybind11::object apart_dtensor);

/// The reverse, in the other process. \param join_dtensor  From any other value that is left, and a function that gives
/// the next tensor, to what takes its place.
pybind11::object put_together(pybind11::handle tree, std::string_view tensors, std::shared_ptr<staging::Pages> pages,
                              pybind11::object stand_in, pybind11::object join_dtensor);

}  // namespace bytecheckpoint::bindings
