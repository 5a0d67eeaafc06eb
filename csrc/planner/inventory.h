// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/planner/rank_sets.h"
#include "csrc/tensor/box.h"
#include "csrc/tensor/dtype.h"
#include "csrc/tensor/tensor_info.h"

namespace bytecheckpoint::planner {

/// What DCP's write items call an entry of the state dict; travels, never renumber.
enum class EntryKind : uint8_t {
  kBytes = 0,   // BYTE_IO: an object
  kTensor = 1,  // TENSOR: a plain tensor, held whole
  kShard = 2,   // SHARD: of a DTensor or ShardedTensor; ranks hold boxes of it
};

/// Most dims that a tensor can have.
inline constexpr size_t kMaxDims = 255;

/// One entry of the flattened state dict. Names, dims and holders lie in the pools of the inventory.
struct Entry {
  EntryKind kind = EntryKind::kBytes;
  bool can_split = false;  // may several ranks write parts of one box?
  tensor::DType dtype = tensor::DType::kNone;
  bool requires_grad = false;
  bool pin_memory = false;
  uint8_t memory_format = 0;
  uint8_t num_dims = 0;
  uint32_t first_rank = 0;  // the lowest that has the entry: its properties, path and position count
  uint32_t ordinal = 0;     // position in that rank's state dict
  uint32_t num_boxes = 0;   // of a kTensor or kBytes one
  uint32_t fqn_size = 0;
  uint32_t path_size = 0;
  uint64_t fqn_begin = 0;
  uint64_t path_begin = 0;
  uint64_t dims_begin = 0;   // num_dims sizes of the tensor, then its boxes
  uint32_t boxes_begin = 0;  // boxes of one entry are numbered without gaps

  bool is_tensor() const { return kind != EntryKind::kBytes; }
};

/// What a set of ranks holds: of one rank its local plan, of several the union, in which what replicas share stands
/// once.
///
/// Entries stand in the order of the lowest rank's state dict; those that only later ranks have follow in their order,
/// as DCP orders its metadata. Boxes of an entry are distinct and stand in the order of box_order.h. Everything is in
/// flat arrays: two million boxes are the size to handle.
struct Inventory {
  std::vector<Entry> entries;
  std::string text;
  std::vector<int64_t> dims;
  std::vector<RankSets::Id> holders;  // of each box
  RankSets rank_sets;
  RankSets::Id ranks = 0;  // whose inventory this is

  size_t num_boxes() const { return holders.size(); }
  std::string_view fqn(const Entry& entry) const {
    return std::string_view(text).substr(entry.fqn_begin, entry.fqn_size);
  }
  std::string_view path(const Entry& entry) const {
    return std::string_view(text).substr(entry.path_begin, entry.path_size);
  }
  const int64_t* sizes(const Entry& entry) const { return dims.data() + entry.dims_begin; }
  /// Offsets, then sizes, of the entry's box `number`, counted from 0.
  const int64_t* box_dims(const Entry& entry, size_t number) const {
    return sizes(entry) + entry.num_dims * (2 * number + 1);
  }
  RankSets::Id box_holders(const Entry& entry, size_t number) const { return holders[entry.boxes_begin + number]; }
  tensor::TensorInfo info(const Entry& entry) const;
  tensor::Box box(const Entry& entry, size_t number) const;
  /// Bytes of the elements of a box that lies in its tensor. An element of an opaque dtype counts as one byte: how long
  /// it gets is not known before it is pickled. Bytes objects count as nothing.
  int64_t box_bytes(const Entry& entry, size_t number) const;

  /// Entry numbers sorted by the bytes of their names: the one order that a rank and the planner both know.
  std::vector<uint32_t> by_name() const;
};

/// Makes the inventory of one rank.
class InventoryBuilder {
 public:
  explicit InventoryBuilder(uint32_t rank) : rank_(rank) { inventory_.ranks = RankSets::single(rank); }

  /// The next entry of the flattened state dict. An entry of which the rank holds nothing is not one: leave it out.
  ///
  /// \param path   Way through the nested dicts, opaque here; empty for the trivial one.
  /// \param info   Of a tensor; ignored for kBytes.
  /// \param boxes  Of a kShard what the rank holds, one at least, in any order; ignored for others.
  /// \returns kInvalidArgument for a name or a box given twice, an unknown dtype, negative or overflowing dims, more
  /// than kMaxDims of them. Whether boxes lie in their tensor is asked later, of all ranks.
  base::Status add(std::string_view fqn, EntryKind kind, std::string_view path, const tensor::TensorInfo& info,
                   bool can_split, const std::vector<tensor::Box>& boxes);

  /// The inventory; the builder is spent. kInvalidArgument for a rank of kMaxRanks or above.
  base::Result<Inventory> finish();

 private:
  base::Status add_boxes(const std::vector<tensor::Box>& boxes, Entry* entry);

  uint32_t rank_;
  Inventory inventory_;
  base::IndexTable names_;
};

/// Can a tensor be of this dtype and these sizes: known, nothing negative, bytes that fit in int64?
bool is_possible(tensor::DType dtype, const int64_t* sizes, size_t num_dims);

/// `float32 [2, 3]`, for messages.
std::string to_text(const Inventory& inventory, const Entry& entry);
/// `box at [0, 0] of [2, 3]`
std::string box_to_text(const int64_t* box, size_t num_dims);

}  // namespace bytecheckpoint::planner
