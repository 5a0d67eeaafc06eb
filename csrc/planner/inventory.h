// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/planner/box_words.h"
#include "csrc/planner/rank_sets.h"
#include "csrc/tensor/box.h"
#include "csrc/tensor/dtype.h"
#include "csrc/tensor/tensor_info.h"

namespace bytecheckpoint::planner {

/// Kind of an entry of the state dict; the names of DCP's WriteItemType are in capitals. Ranks send these numbers to
/// one another: never change one.
enum class EntryKind : uint8_t {
  kBytes = 0,   // BYTE_IO: an object, written as bytes
  kTensor = 1,  // TENSOR: a plain tensor, which a rank holds whole
  kShard = 2,   // SHARD: a DTensor or ShardedTensor, of which ranks hold boxes
};

/// Largest number of dims of a tensor.
inline constexpr size_t kMaxDims = 255;

/// Memory for the numbers of a box: its offsets, then its sizes.
using BoxArray = std::array<int64_t, 2 * kMaxDims>;

/// One entry of the flattened state dict. Its name, dims and holders are stored in arrays of the Inventory; the fields
/// `..._begin` and `..._size` say where.
struct Entry {
  EntryKind kind = EntryKind::kBytes;
  bool can_split = false;  // several ranks may write parts of one box
  tensor::DType dtype = tensor::DType::kNone;
  bool requires_grad = false;
  bool pin_memory = false;
  uint8_t memory_format = 0;
  uint8_t num_dims = 0;
  bool is_wide = false;     // see box_words.h
  uint32_t first_rank = 0;  // the lowest rank that has the entry; properties, path and ordinal are its own
  uint32_t ordinal = 0;     // position in the state dict of first_rank
  uint32_t num_boxes = 0;   // 1 for kTensor and kBytes
  uint32_t fqn_size = 0;
  uint32_t path_size = 0;
  uint64_t fqn_begin = 0;
  uint64_t path_begin = 0;
  uint64_t dims_begin = 0;   // in `dims`: num_dims sizes of the tensor
  uint64_t words_begin = 0;  // in `box_words`: the boxes of a kShard entry
  uint32_t boxes_begin = 0;  // in `holders`: the entry's boxes are neighbours there

  bool is_tensor() const { return kind != EntryKind::kBytes; }
};

/// What one rank holds (its local plan), or the union of what several ranks hold; there each replicated box stands
/// once.
///
/// Entries are in the order of the lowest rank's state dict. Entries that only higher ranks have follow, in the order
/// of those ranks. DCP orders its metadata in the same way. The boxes of an entry are distinct and in the order of
/// box_order.h.
/// All numbers are in flat arrays, because an inventory may have 20 million boxes. For an entry with 2 dims and 2
/// boxes:
///
///     dims       ... | size size | ...                                    from dims_begin on
///     box_words  ... | off off size size | off off size size | ...        from words_begin on
///     holders            ... | set of box 0 | set of box 1 | ...          from boxes_begin on
///
/// The box of a plain tensor is the whole, and not in box_words.
struct Inventory {
  std::vector<Entry> entries;
  std::string text;
  std::vector<int64_t> dims;
  std::vector<uint32_t> box_words;    // see box_words.h
  std::vector<RankSets::Id> holders;  // of each box: the ranks that hold it
  /// Of each box: which of its holders may write it; empty if any of them may. It is not encoded: `compare_copies`
  /// fills it where all are merged.
  std::vector<RankSets::Id> writers;
  RankSets rank_sets;
  RankSets::Id ranks = 0;  // the ranks whose inventory this is

  size_t num_boxes() const { return holders.size(); }
  std::string_view fqn(const Entry& entry) const {
    return std::string_view(text).substr(entry.fqn_begin, entry.fqn_size);
  }
  std::string_view path(const Entry& entry) const {
    return std::string_view(text).substr(entry.path_begin, entry.path_size);
  }
  const int64_t* sizes(const Entry& entry) const { return dims.data() + entry.dims_begin; }
  /// Copies the offsets, then the sizes, of box `number` of the entry, counted from 0, to `out`. \returns out->data().
  const int64_t* box_dims(const Entry& entry, size_t number, BoxArray* out) const;
  /// Does the same for all boxes of the entry, one behind the other, faster than one by one.
  void unpack_boxes(const Entry& entry, std::vector<int64_t>* numbers) const;
  RankSets::Id box_holders(const Entry& entry, size_t number) const { return holders[entry.boxes_begin + number]; }
  tensor::TensorInfo info(const Entry& entry) const;
  tensor::Box box(const Entry& entry, size_t number) const;
  /// Returns the bytes of the elements of a box that lies in its tensor. An element of an opaque dtype counts as one
  /// byte, because its size is not known before it is pickled. An object counts as 0 bytes.
  int64_t box_bytes(const Entry& entry, size_t number) const;

  /// Returns the numbers of all entries, sorted by the bytes of their names. This is the one order that a rank and the
  /// planner both know.
  std::vector<uint32_t> by_name() const;
};

/// Makes the inventory of one rank. Not thread-safe.
class InventoryBuilder {
 public:
  explicit InventoryBuilder(uint32_t rank) : rank_(rank) { inventory_.ranks = RankSets::single(rank); }

  /// Adds the next entry of the flattened state dict. Leave out entries of which the rank holds nothing.
  ///
  /// \param path  Path through the nested dicts, as bytes that are only passed on; empty for an entry at the top.
  /// \param info  Properties of the tensor; ignored for kBytes.
  /// \param can_split  Whether several ranks may write parts of one box.
  /// \param boxes  For kShard, the boxes that the rank holds, at least one, in any order. Ignored for other kinds.
  /// \param order  If it is given, it gets the numbers of `boxes` for a kShard entry, in the order in which the
  /// inventory has them.
  /// \returns kInvalidArgument if the name or a box was given before, the dtype is unknown, dims are negative, overflow
  /// or are more than kMaxDims. After a failure the builder is as before the call. That boxes lie in their tensor is
  /// not checked here but in validate_inventory, for all ranks.
  base::Status add(std::string_view fqn, EntryKind kind, std::string_view path, const tensor::TensorInfo& info,
                   bool can_split, const std::vector<tensor::Box>& boxes, std::vector<size_t>* order = nullptr);

  /// Returns the inventory; the builder must not be used afterwards. \returns kInvalidArgument if the rank is kMaxRanks
  /// or above.
  base::Result<Inventory> finish();

 private:
  base::Status add_boxes(const std::vector<tensor::Box>& boxes, Entry* entry, std::vector<size_t>* order_out);

  uint32_t rank_;
  Inventory inventory_;
  base::IndexTable names_;
};

/// Returns whether a tensor can have this dtype and these sizes: the dtype is known, no size is negative, there are at
/// most kMaxDims, and the bytes fit in int64.
bool is_possible(tensor::DType dtype, const int64_t* sizes, size_t num_dims);

/// Returns the bytes that each element of the entry counts in `Inventory::box_bytes`.
int64_t element_bytes(const Entry& entry);

/// Returns whether a box, its offsets and then its sizes, has no elements.
inline bool is_empty_box(const int64_t* box, size_t num_dims) {
  for (size_t d = num_dims; d < 2 * num_dims; ++d) {
    if (box[d] == 0) return true;
  }
  return false;
}

/// Returns `num` times the product of the sizes of a box.
inline int64_t times_box(int64_t num, const int64_t* box, size_t num_dims) {
  for (size_t d = num_dims; d < 2 * num_dims; ++d) num *= box[d];
  return num;
}

/// Describes an entry for messages: `a plain tensor, float32 [2, 3]`.
std::string to_text(const Inventory& inventory, const Entry& entry);
/// Describes a box for messages: `box at [0, 0] of [2, 3]`.
std::string box_to_text(const int64_t* box, size_t num_dims);

}  // namespace bytecheckpoint::planner
