// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/planner/tensor_view.h"

namespace bytecheckpoint::engine {

struct QuantizedChunk;

/// Where the elements of a chunk of a view are in its record, which has those of a stored chunk.
struct RecordView {
  tensor::Dims record_sizes;  // of the stored chunk; its elements are row-major, unless the record says otherwise
  int64_t offset = 0;         // of the chunk's first element, in elements
  tensor::Dims strides;       // of the chunk's dims, in elements
  /// Set if the elements are computed from those of the record; then `offset` and `strides` count codes.
  std::shared_ptr<const QuantizedChunk> quantized;
};

/// A quantized tensor that is dequantized while it is read: the element at index `i` is the code there, times the scale
/// at index `i / block`, as `staging::Dequantizer` computes it. It is described once, and then handled like any other:
/// its parts, transposed or stacked, know where their codes are, and from there the scales.
struct Dequantization {
  tensor::DType codes = tensor::DType::kNone;   // a small float
  tensor::DType stored = tensor::DType::kNone;  // dtype of the records; other than `codes` if it only holds their bits
  tensor::DType values = tensor::DType::kNone;  // dtype that is made
  tensor::Dims block;                           // indices of each dim with one scale
  tensor::DType scale_dtype = tensor::DType::kNone;
  tensor::Dims scale_sizes;                 // as many dims as the tensor
  std::vector<format::Chunk> scale_chunks;  // together all of the scales
  std::vector<RecordView> scale_views;      // of each chunk
};

/// A box of a quantized tensor, and where its codes are in a record.
struct QuantizedChunk {
  std::shared_ptr<const Dequantization> how;
  planner::ViewedBox box;  // offset and strides in codes
};

/// A chunk to read, and how it lies in its record.
struct ChunkInRecord {
  const format::Chunk* chunk = nullptr;
  const RecordView* view = nullptr;  // null: the chunk is all that is in the record
};

/// Returns how many bytes of values a byte of the record makes: 1, but for codes that are dequantized.
int64_t bytes_made_of_one(const ChunkInRecord& chunk);

/// A checkpoint under other names, and with tensors that are put together from those that are stored. Its manifest is
/// read like any other; only where the elements of a chunk are, the record alone does not say.
struct CheckpointView {
  std::shared_ptr<const format::Manifest> stored;  // what it is a view of
  format::Manifest manifest;
  /// For each item one per chunk; nothing for an item whose chunks are those that are stored.
  std::vector<std::vector<RecordView>> record_views;
  /// For each item whether elements that are in no chunk are padding: zero where they are read without a state, left as
  /// they are in a state.
  std::vector<bool> is_padded;

  bool pads(const format::Item& item) const { return is_padded[static_cast<size_t>(&item - manifest.items.data())]; }
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
    bool is_padded = false;  // some elements are stored nowhere, and are zero
    planner::TensorView view;
  };

  explicit CheckpointViewBuilder(std::shared_ptr<const format::Manifest> stored) : stored_(std::move(stored)) {}

  /// Returns a stored tensor as it is. \returns kInvalidArgument for an object, or if there is no such item.
  base::Result<Tensor> tensor(const std::string& fqn);
  /// Joins tensors; see `planner::concatenate` and `planner::stack`. \returns kInvalidArgument, also for different
  /// dtypes.
  static base::Result<Tensor> joined(const std::vector<Tensor>& parts, size_t dim, bool is_stack);
  /// Returns a tensor of which one dim is longer; see `planner::pad`. \returns kInvalidArgument also for a tensor of
  /// which elements are in no chunk: nothing would tell them from padding.
  static base::Result<Tensor> padded(const Tensor& tensor, size_t dim, int64_t size);
  /// Returns the tensor of the values of a quantized one.
  ///
  /// \param codes   A small float, or, if `is_packed`, bytes that hold two codes of float4_e2m1fn each, the one in the
  /// low bits first; then the last dim becomes twice as long.
  /// \param scales  Has as many dims as `codes`, each as long as that of the result has blocks.
  /// \param block   One number for each dim.
  /// \returns kInvalidArgument for other dtypes and shapes, and for scales that lack elements.
  base::Result<Tensor> dequantized(const Tensor& codes, const Tensor& scales, const tensor::Dims& block,
                                   tensor::DType values, bool is_packed);

  /// Adds a tensor to the view. \returns kUnsupported if a part of it has only every other code of pairs in a byte.
  base::Status add(std::string fqn, Tensor made);
  /// Adds a stored item, of any kind, under a name. \returns kInvalidArgument if there is no such item.
  base::Status keep(std::string fqn, const std::string& stored);

  /// Returns the view; the builder must not be used afterwards. \returns kInvalidArgument for a name that was added
  /// twice.
  base::Result<std::shared_ptr<const CheckpointView>> finish();

 private:
  /// A record that boxes are in.
  struct Source {
    const format::Chunk* chunk;
    std::shared_ptr<const QuantizedChunk> quantized;  // null: its elements are taken as they are
  };
  struct Added {
    format::Item item;
    std::vector<RecordView> views;
    bool is_padded = false;
  };

  base::Result<const format::Item*> find(const std::string& fqn) const;
  /// Returns the chunk that a box of a tensor is, and how it lies in its record.
  std::pair<format::Chunk, RecordView> placed(planner::ViewedBox viewed) const;

  const std::shared_ptr<const format::Manifest> stored_;
  std::vector<Source> sources_;  // `ViewedBox::source` is an index into it
  std::vector<Added> added_;
};

}  // namespace bytecheckpoint::engine
