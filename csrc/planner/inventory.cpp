// SPDX-License-Identifier: Apache-2.0
#include "csrc/planner/inventory.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "csrc/base/bytes.h"
#include "csrc/base/order_by_name.h"
#include "csrc/planner/box_order.h"

namespace bytecheckpoint::planner {

using base::Code;
using base::Status;
using base::text;
using tensor::Dims;

tensor::TensorInfo Inventory::info(const Entry& entry) const {
  tensor::TensorInfo info;
  info.dtype = entry.dtype;
  info.requires_grad = entry.requires_grad;
  info.pin_memory = entry.pin_memory;
  info.memory_format = entry.memory_format;
  info.sizes = Dims(sizes(entry), sizes(entry) + entry.num_dims);
  return info;
}

tensor::Box Inventory::box(const Entry& entry, size_t number) const {
  BoxArray numbers;
  const int64_t* offsets = box_dims(entry, number, &numbers);
  const int64_t* box_sizes = offsets + entry.num_dims;
  return {Dims(offsets, box_sizes), Dims(box_sizes, box_sizes + entry.num_dims)};
}

const int64_t* Inventory::box_dims(const Entry& entry, size_t number, BoxArray* out) const {
  const size_t num_dims = entry.num_dims;
  if (entry.kind == EntryKind::kShard) {
    const uint32_t* words = box_words.data() + entry.words_begin + number * num_words(2 * num_dims, entry.is_wide);
    unpack_numbers(words, 2 * num_dims, entry.is_wide, out->data());
  } else {
    std::fill_n(out->data(), num_dims, 0);
    std::copy_n(sizes(entry), num_dims, out->data() + num_dims);
  }
  return out->data();
}

void Inventory::unpack_boxes(const Entry& entry, std::vector<int64_t>* numbers) const {
  const size_t num_numbers = 2 * size_t{entry.num_dims};
  numbers->resize(entry.num_boxes * num_numbers);
  if (entry.kind == EntryKind::kShard) {
    unpack_numbers(box_words.data() + entry.words_begin, numbers->size(), entry.is_wide, numbers->data());
  } else {
    BoxArray box;
    std::copy_n(box_dims(entry, 0, &box), num_numbers, numbers->data());
  }
}

int64_t Inventory::box_bytes(const Entry& entry, size_t number) const {
  BoxArray box;
  return times_box(element_bytes(entry), box_dims(entry, number, &box), entry.num_dims);
}

int64_t element_bytes(const Entry& entry) {
  return entry.is_tensor() ? std::max<int64_t>(tensor::find_dtype(entry.dtype)->itemsize_bytes, 1) : 0;
}

std::vector<uint32_t> Inventory::by_name() const {
  return base::order_by_name(entries.size(), [this](uint32_t e) { return fqn(entries[e]); });
}

bool is_possible(tensor::DType dtype, const int64_t* sizes, size_t num_dims) {
  const tensor::DTypeInfo* info = tensor::find_dtype(dtype);
  if (info == nullptr || num_dims > kMaxDims) return false;
  int64_t bytes = std::max<int64_t>(info->itemsize_bytes, 1);
  for (size_t d = 0; d < num_dims; ++d) {
    if (!base::checked_mul(bytes, sizes[d], &bytes)) return false;
  }
  return true;
}

std::string to_text(const Inventory& inventory, const Entry& entry) {
  if (!entry.is_tensor()) return "an object";
  return text(entry.kind == EntryKind::kShard ? "shards of a tensor, " : "a plain tensor, ",
              tensor::find_dtype(entry.dtype)->name, " ", tensor::to_text(inventory.info(entry).sizes));
}

std::string box_to_text(const int64_t* box, size_t num_dims) {
  return text("box at ", tensor::to_text(Dims(box, box + num_dims)), " of ",
              tensor::to_text(Dims(box + num_dims, box + 2 * num_dims)));
}

Status InventoryBuilder::add(std::string_view fqn, EntryKind kind, std::string_view path,
                             const tensor::TensorInfo& info, bool can_split, const std::vector<tensor::Box>& boxes,
                             std::vector<size_t>* order) {
  const auto refuse = [&](const std::string& why) {
    return Status::make(Code::kInvalidArgument, text("'", fqn, "': ", why));
  };
  Entry entry;
  entry.kind = kind;
  entry.first_rank = rank_;
  entry.ordinal = static_cast<uint32_t>(inventory_.entries.size());
  entry.fqn_begin = inventory_.text.size();
  entry.fqn_size = static_cast<uint32_t>(fqn.size());
  entry.path_begin = entry.fqn_begin + fqn.size();
  entry.path_size = static_cast<uint32_t>(path.size());
  entry.dims_begin = inventory_.dims.size();
  entry.words_begin = inventory_.box_words.size();
  entry.boxes_begin = static_cast<uint32_t>(inventory_.holders.size());
  entry.num_boxes = 1;
  const uint64_t hash = std::hash<std::string_view>()(fqn);
  const auto is_same = [&](uint32_t index) { return inventory_.fqn(inventory_.entries[index]) == fqn; };
  if (names_.find(hash, is_same) != base::IndexTable::kNone) return refuse("the key is given twice");
  if (kind != EntryKind::kBytes) {
    if (!is_possible(info.dtype, info.sizes.data(), info.sizes.size()) || info.memory_format > 2) {
      return refuse(text("no tensor has dtype code ", static_cast<int>(info.dtype), ", sizes ",
                         tensor::to_text(info.sizes), " and memory format ", static_cast<int>(info.memory_format)));
    }
    entry.dtype = info.dtype;
    entry.requires_grad = info.requires_grad;
    entry.pin_memory = info.pin_memory;
    entry.memory_format = info.memory_format;
    entry.can_split = can_split;
    entry.num_dims = static_cast<uint8_t>(info.sizes.size());
    inventory_.dims.insert(inventory_.dims.end(), info.sizes.begin(), info.sizes.end());
    const Status added = kind == EntryKind::kShard ? add_boxes(boxes, &entry, order) : Status::ok();
    if (!added.is_ok()) {
      inventory_.dims.resize(entry.dims_begin);
      return refuse(added.message());
    }
  }
  inventory_.text.append(fqn).append(path);
  inventory_.holders.resize(inventory_.holders.size() + entry.num_boxes, RankSets::single(rank_));
  names_.insert(hash, entry.ordinal);
  inventory_.entries.push_back(entry);
  return Status::ok();
}

Status InventoryBuilder::add_boxes(const std::vector<tensor::Box>& boxes, Entry* entry,
                                   std::vector<size_t>* order_out) {
  const auto refuse = [](std::string why) { return Status::make(Code::kInvalidArgument, std::move(why)); };
  const size_t num_dims = entry->num_dims;
  if (boxes.empty()) return refuse("this rank holds no box of the tensor");
  std::vector<int64_t> flat;
  for (const tensor::Box& box : boxes) {
    if (box.offsets.size() != num_dims || box.sizes.size() != num_dims) {
      return refuse(text("a box does not have the ", num_dims, " dims of the tensor"));
    }
    flat.insert(flat.end(), box.offsets.begin(), box.offsets.end());
    flat.insert(flat.end(), box.sizes.begin(), box.sizes.end());
  }
  if (std::any_of(flat.begin(), flat.end(), [](int64_t number) { return number < 0; })) {
    return refuse("a box has a negative offset or size");
  }
  const int64_t* sizes = inventory_.sizes(*entry);
  std::vector<size_t> order(boxes.size());
  std::iota(order.begin(), order.end(), 0);
  const auto compare = [&](size_t a, size_t b) {
    const int64_t* box_a = flat.data() + 2 * num_dims * a;
    const int64_t* box_b = flat.data() + 2 * num_dims * b;
    const uint64_t at_a = first_position(sizes, box_a, num_dims);
    const uint64_t at_b = first_position(sizes, box_b, num_dims);
    return at_a != at_b ? (at_a < at_b ? -1 : 1) : compare_boxes(box_a, box_b, num_dims);
  };
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return compare(a, b) < 0; });
  const auto twice =
      std::adjacent_find(order.begin(), order.end(), [&](size_t a, size_t b) { return compare(a, b) == 0; });
  if (twice != order.end()) {
    return refuse(
        text("rank ", rank_, " holds the ", box_to_text(flat.data() + 2 * num_dims * *twice, num_dims), " twice"));
  }
  entry->is_wide = needs_wide(flat.data(), flat.size());
  inventory_.box_words.resize(entry->words_begin + num_words(flat.size(), entry->is_wide));
  uint32_t* words = inventory_.box_words.data() + entry->words_begin;
  for (const size_t i : order) {
    words = pack_numbers(flat.data() + 2 * num_dims * i, 2 * num_dims, entry->is_wide, words);
  }
  entry->num_boxes = static_cast<uint32_t>(boxes.size());
  if (order_out != nullptr) *order_out = std::move(order);
  return Status::ok();
}

base::Result<Inventory> InventoryBuilder::finish() {
  if (rank_ >= kMaxRanks) {
    return Status::make(Code::kInvalidArgument, text("rank ", rank_, ": at most ", kMaxRanks, " ranks are possible"));
  }
  return std::move(inventory_);
}

}  // namespace bytecheckpoint::planner
