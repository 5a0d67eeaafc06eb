// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest.h"
#include "csrc/planner/tensor_view.h"

namespace bytecheckpoint::engine {

/// Where the elements of a chunk of a view are in its record, which has those of a stored chunk.
struct RecordView {
  tensor::Dims record_sizes;  // of the stored chunk; its elements are row-major, unless the record says otherwise
  int64_t offset = 0;         // of the chunk's first element, in elements
  tensor::Dims strides;       // of the chunk's dims, in elements
};

/// A chunk to read, and how it lies in its record.
struct ChunkInRecord {
  const format::Chunk* chunk = nullptr;
  const RecordView* view = nullptr;  // null: the chunk is all that is in the record
};

/// A checkpoint under other names, and with tensors that are put together from those that are stored. Its manifest is
/// read like any other; only where the elements of a chunk are, the record alone does not say.
struct CheckpointView {
  std::shared_ptr<const format::Manifest> stored;  // what it is a view of
  format::Manifest manifest;
  /// For each item one per chunk; nothing for an item whose chunks are those that are stored.
  std::vector<std::vector<RecordView>> record_views;

  /// Returns how a chunk of an item lies in its record; null if it is all of it.
  const RecordView* find(const format::Item& item, size_t chunk) const {
    const std::vector<RecordView>& views = record_views[static_cast<size_t>(&item - manifest.items.data())];
    return views.empty() ? nullptr : &views[chunk];
  }
};

/// Makes a view: `tensor` and the operations of `planner/tensor_view.h`, then `add`; or `keep` for items that only get
/// another name. Not thread-safe.
class CheckpointViewBuilder {
 public:
  /// A tensor of the view, before it has a name.
  struct Tensor {
    tensor::TensorInfo info;  // without sizes
    bool is_partial = false;
    planner::TensorView view;
  };

  explicit CheckpointViewBuilder(std::shared_ptr<const format::Manifest> stored) : stored_(std::move(stored)) {}

  /// Returns a stored tensor as it is. \returns kInvalidArgument for an object, or if there is no such item.
  base::Result<Tensor> tensor(const std::string& fqn);
  /// Joins tensors; see `planner::concatenate` and `planner::stack`. \returns kInvalidArgument, also for different
  /// dtypes.
  static base::Result<Tensor> joined(const std::vector<Tensor>& parts, size_t dim, bool is_stack);

  /// Adds a tensor to the view.
  void add(std::string fqn, Tensor made);
  /// Adds a stored item, of any kind, under a name. \returns kInvalidArgument if there is no such item.
  base::Status keep(std::string fqn, const std::string& stored);

  /// Returns the view; the builder must not be used afterwards. \returns kInvalidArgument for a name that was added
  /// twice.
  base::Result<std::shared_ptr<const CheckpointView>> finish();

 private:
  struct Added {
    format::Item item;
    std::vector<RecordView> views;
  };

  base::Result<const format::Item*> find(const std::string& fqn) const;

  const std::shared_ptr<const format::Manifest> stored_;
  std::vector<const format::Chunk*> sources_;  // `ViewedBox::source` is an index into it
  std::vector<Added> added_;
};

}  // namespace bytecheckpoint::engine
