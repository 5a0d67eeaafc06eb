// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/read_plan.h"

#include <algorithm>
#include <string_view>

#include "csrc/bridge/errors.h"
#include "csrc/bridge/unlocked.h"

namespace bytecheckpoint::bridge {
namespace {

namespace py = pybind11;
using base::text;

// The most keys that a message names.
constexpr size_t kMostNames = 20;

/// Returns a list for a message: `'a', 'b' and 3 more`.
std::string list_names(const std::vector<std::string>& names) {
  std::string out;
  for (size_t i = 0; i < names.size() && i < kMostNames; ++i) out += (i == 0 ? "'" : ", '") + names[i] + "'";
  if (names.size() > kMostNames) out += text(" and ", names.size() - kMostNames, " more");
  return out;
}

[[noreturn]] void refuse_plan(const std::string& message) {
  raise(base::Status::make(base::Code::kInvalidArgument, message));
}

void check(const PlannedRead& planned, const format::Chunk& chunk) {
  const format::RecordKind kind = chunk.record.kind;
  // Reported when its file is looked for.
  if (kind == format::RecordKind::kAbsent || kind == format::RecordKind::kRefused) return;
  const bool stored_bytes = kind == format::RecordKind::kBytes || kind == format::RecordKind::kInline;
  if (planned.is_tensor == stored_bytes) {
    refuse_plan(text("'", planned.fqn, "': the load asks for ", planned.is_tensor ? "a tensor" : "bytes",
                     ", but stored is ", stored_bytes ? "bytes" : "a tensor"));
  }
  if (planned.is_tensor && !tensor::is_inside(planned.box, chunk.box.sizes)) {
    raise_as("ShapeMismatchError", text("'", planned.fqn, "': wanted ", tensor::to_text(planned.box.sizes), " at ",
                                        tensor::to_text(planned.box.offsets), " of a stored chunk, got a chunk of ",
                                        tensor::to_text(chunk.box.sizes)));
  }
}

/// Whether the dtype of the value has no imaginary parts.
bool is_real(const StateValue& state_value) {
  if (state_value.kind != StateValue::Kind::kOther) {
    return state_value.facts.dtype != tensor::DType::kNone && !is_complex(state_value.facts.dtype);
  }
  return py::hasattr(state_value.value, "dtype") && !state_value.value.attr("dtype").attr("is_complex").cast<bool>();
}

/// Returns its dtype as text.
std::string dtype_text(const StateValue& state_value) {
  if (state_value.kind != StateValue::Kind::kOther) return tensor::find_dtype(state_value.facts.dtype)->name;
  return py::str(state_value.value.attr("dtype"));
}

/// Returns the shape of a tensor of the state, of any type; nothing if it has none.
std::optional<tensor::Dims> shape_of(const StateValue& state_value) {
  if (state_value.kind == StateValue::Kind::kObject) return std::nullopt;
  if (state_value.kind != StateValue::Kind::kOther) return state_value.facts.sizes;
  tensor::Dims sizes;
  for (const py::handle size : state_value.value.attr("size")()) sizes.push_back(size.cast<int64_t>());
  return sizes;
}

/// Returns the shape as torch prints it, for messages worded as DCP's own.
std::string size_text(const tensor::Dims& sizes) {
  return text("torch.Size(", tensor::to_text(sizes), ")");
}

/// Whether torch hands the value to `set_extra_state` of a module, which may take a tensor and other values.
bool is_extra_state(const std::string& fqn) {
  constexpr std::string_view kEnd = "_extra_state";
  return fqn.size() >= kEnd.size() && fqn.compare(fqn.size() - kEnd.size(), kEnd.size(), kEnd) == 0;
}

/// Returns why what is stored cannot be loaded into `state_value`; nothing if it can. For an object that is to be
/// loaded into a tensor without dims, its value will say.
std::optional<std::string> mismatch(const format::Item& item, const StateValue& state_value) {
  const std::optional<tensor::Dims> shape = shape_of(state_value);
  if (!item.is_tensor) {
    if (!shape.has_value() || shape->empty() || is_extra_state(item.fqn)) return std::nullopt;
    return text("'", item.fqn, "': stored is an object that is no tensor, to be loaded into a tensor of ",
                tensor::to_text(*shape), "; put None there for the stored object");
  }
  if (!shape.has_value()) {
    return text("'", item.fqn, "': stored is a tensor of ", tensor::to_text(item.tensor.sizes),
                ", to be loaded into a value of type ", Py_TYPE(state_value.value.ptr())->tp_name,
                "; put a tensor of this shape and of dtype ", tensor::find_dtype(item.tensor.dtype)->name, " there");
  }
  if (*shape != item.tensor.sizes) {
    return text("'", item.fqn, "': stored is a tensor of ", tensor::to_text(item.tensor.sizes),
                ", to be loaded into one of ", tensor::to_text(*shape), ": Size mismatch between saved ",
                size_text(item.tensor.sizes), " and current: ", size_text(*shape), " for ", item.fqn);
  }
  if (is_complex(item.tensor.dtype) && is_real(state_value)) {
    return text("'", item.fqn, "': stored is ", tensor::find_dtype(item.tensor.dtype)->name, ", to be loaded into ",
                dtype_text(state_value), ", which cannot hold the imaginary parts");
  }
  return std::nullopt;
}

/// Whether this rank holds any element of the tensor.
bool has_elements(const StateValue& state_value) {
  return std::any_of(state_value.boxes.begin(), state_value.boxes.end(),
                     [](const tensor::Box& box) { return tensor::has_elements(box); });
}

/// Joins sentences, of which many say the same of many keys.
std::string joined(const std::vector<std::string>& sentences) {
  std::string all = sentences.empty() ? std::string() : sentences.front();
  for (size_t i = 1; i < sentences.size() && i < kMostNames; ++i) all += "; " + sentences[i];
  if (sentences.size() > kMostNames) all += text("; and ", sentences.size() - kMostNames, " more");
  return all;
}

/// Returns a clause about all keys that nobody asks for: a missing one may be among them under another name.
std::string unexpected_keys(const format::Manifest& manifest, const std::vector<StateValue>& state) {
  std::vector<std::string> asked;
  for (const StateValue& state_value : state) asked.push_back(state_value.fqn);
  std::sort(asked.begin(), asked.end());
  std::vector<std::string> unexpected;
  for (const format::Item& item : manifest.items) {
    if (!std::binary_search(asked.begin(), asked.end(), item.fqn)) unexpected.push_back(item.fqn);
  }
  if (unexpected.empty()) return "";
  return text("; these are in the checkpoint, but not asked for: ", list_names(unexpected));
}

using Found = std::optional<format::FoundItem>;

/// Returns the items of the state's values; nothing for one that the checkpoint does not have.
base::Result<std::vector<Found>> find_items(engine::ManifestReader* parts, const std::vector<StateValue>& state) {
  std::vector<Found> found;
  for (const StateValue& state_value : state) {
    BCP_ASSIGN_OR_RETURN(Found item, parts->find_item(state_value.fqn));
    found.push_back(std::move(item));
  }
  return found;
}

/// Reads the items that were found, with the chunks that the state wants.
base::Result<std::vector<format::Item>> read_parts(engine::ManifestReader* parts, const std::vector<Found>& found,
                                                   const std::vector<StateValue>& state) {
  std::vector<format::Item> items;
  for (size_t i = 0; i < found.size(); ++i) {
    if (!found[i].has_value()) continue;
    BCP_ASSIGN_OR_RETURN(format::Item item, parts->read_part(*found[i], state[i].boxes));
    items.push_back(std::move(item));
  }
  return items;
}

}  // namespace

ReadPlan::ReadPlan(const Checkpoint& checkpoint, const py::iterable& items) : checkpoint_(&checkpoint) {
  for (const py::handle item : items) {
    Read read;
    read.planned = read_read_item(item);
    const engine::ChunkInRecord found =
        checkpoint.find_chunk(read.planned.fqn, read.planned.chunk_offsets, read.planned.hint);
    read.chunk = found.chunk;
    read.view = found.view;
    read.item = py::reinterpret_borrow<py::object>(item);
    check(read.planned, *read.chunk);
    add(std::move(read));
  }
}

ReadPlan::ReadPlan(const Checkpoint& checkpoint, std::vector<StateValue> state, const Strictness& strictness)
    : checkpoint_(&checkpoint), state_(std::move(state)) {
  std::vector<const format::Item*>& items = item_of_state_;
  if (engine::ManifestReader* parts = checkpoint.parts(); parts != nullptr) {
    const std::vector<Found> found = value_unlocked([&] { return find_items(parts, state_); });
    for (const Found& item : found) items.push_back(item.has_value() ? &item->item : nullptr);
    check_state(strictness);
    part_ = std::make_shared<format::Manifest>(checkpoint.head());
    part_->items = value_unlocked([&] { return read_parts(parts, found, state_); });
    size_t next = 0;
    for (const format::Item*& item : items) {
      if (item != nullptr) item = &part_->items[next++];
    }
  } else {
    for (const StateValue& state_value : state_) items.push_back(checkpoint.whole().find(state_value.fqn));
    check_state(strictness);
  }
  for (size_t i = 0; i < state_.size(); ++i) {
    if (items[i] == nullptr) continue;
    if (items[i]->is_tensor) {
      read_boxes(*items[i], i);
    } else {
      Read read;
      read.planned.fqn = state_[i].fqn;
      read.chunk = &items[i]->chunks.front();
      read.state_index = i;
      add(std::move(read));
    }
  }
}

void ReadPlan::check_state(const Strictness& strictness) const {
  std::vector<std::string> missing, mismatches;
  for (size_t i = 0; i < state_.size(); ++i) {
    if (item_of_state_[i] == nullptr) {
      missing.push_back(state_[i].fqn);
    } else if (auto why = mismatch(*item_of_state_[i], state_[i])) {
      mismatches.push_back(std::move(*why));
    }
  }
  if (strictness.allow_partial) missing.clear();
  std::string wrong = joined(mismatches);
  if (strictness.refuse_casts) {
    const std::string casts = strictness.refuse_casts(this->casts());
    wrong += (wrong.empty() || casts.empty() ? "" : "; ") + casts;
  }
  if (missing.empty() && wrong.empty()) return;
  const bool names_unexpected = !missing.empty() || strictness.refuse_unexpected;
  const std::string unexpected = names_unexpected ? unexpected_keys(checkpoint_->whole(), state_) : "";
  if (missing.empty()) raise_as("ShapeMismatchError", wrong + unexpected);
  std::string message = text("these are to be loaded, but not in the checkpoint: ", list_names(missing)) + unexpected;
  if (!wrong.empty()) message += "; " + wrong;
  message += "; allow_partial_load=True, or LoadSpec(strict='checkpoint'), leaves out what is missing";
  // The sentence of DCP's own planner, which callers search for.
  raise_as("KeyMismatchError", message + text(". Missing key in checkpoint state_dict: ", missing.front(), "."));
}

void ReadPlan::read_boxes(const format::Item& item, size_t state_index) {
  const std::vector<tensor::Box>& boxes = state_[state_index].boxes;
  for (size_t b = 0; b < boxes.size(); ++b) {
    // Checks all boxes: chunks of other writers may overlap, and elements that two chunks have must not hide those that
    // none has.
    covered_.clear();
    for (size_t c = 0; c < item.chunks.size(); ++c) {
      const format::Chunk& chunk = item.chunks[c];
      tensor::Box common;
      if (!tensor::intersect(chunk.box, boxes[b], &common)) continue;
      covered_.add(common);
      Read read;
      read.planned.fqn = item.fqn;
      read.planned.is_tensor = true;
      read.planned.chunk_offsets = chunk.box.offsets;
      read.planned.hint = part_ != nullptr ? -1 : static_cast<int64_t>(c);
      read.planned.box = common;
      for (size_t d = 0; d < common.num_dims(); ++d) {
        read.planned.box.offsets[d] -= chunk.box.offsets[d];
        read.to.push_back(common.offsets[d] - boxes[b].offsets[d]);
      }
      read.chunk = &chunk;
      if (part_ == nullptr) read.view = checkpoint_->chunk_of(item, c).view;
      read.state_index = state_index;
      read.box = b;
      add(std::move(read));
    }
    const tensor::Dims& sizes = item.tensor.sizes;
    const std::string gap = planner::find_gap(covered_.boxes(sizes.size()), boxes[b], sizes);
    const bool is_padded = part_ == nullptr && checkpoint_->view() != nullptr && checkpoint_->view()->pads(item);
    if (!gap.empty() && !is_padded) refuse_plan(text("'", item.fqn, "': ", gap, " in no stored chunk"));
  }
}

void ReadPlan::add(Read read) {
  // Records may share bytes, and another writer's may claim any number of them.
  if (!base::checked_add(num_bytes_, read.chunk->record.bytes, &num_bytes_)) num_bytes_ = INT64_MAX;
  (read.planned.is_tensor ? tensors_ : objects_).push_back(std::move(read));
}

std::vector<Cast> ReadPlan::casts() const {
  std::vector<Cast> casts;
  for (size_t i = 0; i < item_of_state_.size(); ++i) {
    const StateValue& state_value = state_[i];
    if (item_of_state_[i] == nullptr || !item_of_state_[i]->is_tensor || !has_elements(state_value)) continue;
    const tensor::DType from = item_of_state_[i]->tensor.dtype;
    if (state_value.kind != StateValue::Kind::kOther && state_value.facts.dtype == from) continue;
    if (!py::hasattr(state_value.value, "dtype")) continue;
    py::object to = state_value.value.attr("dtype");
    if (py::str(to).cast<std::string>() == text("torch.", tensor::find_dtype(from)->name)) continue;
    casts.push_back({state_value.fqn, from, std::move(to)});
  }
  return casts;
}

std::vector<size_t> ReadPlan::objects_into_tensors() const {
  std::vector<size_t> positions;
  if (state_.empty()) return positions;
  for (size_t i = 0; i < objects_.size(); ++i) {
    const StateValue& state_value = state_[objects_[i].state_index];
    if (state_value.kind != StateValue::Kind::kObject && !is_extra_state(state_value.fqn)) positions.push_back(i);
  }
  return positions;
}

const Read& ReadPlan::tensor_at(size_t position) const {
  if (position >= tensors_.size()) throw py::index_error("no such tensor in the plan");
  return tensors_[position];
}

const Read& ReadPlan::object_at(size_t position) const {
  if (position >= objects_.size()) throw py::index_error("no such object in the plan");
  return objects_[position];
}

py::object ReadPlan::item_of(const Read& read) const {
  if (read.item) return read.item;
  const bool is_tensor = read.planned.is_tensor;
  return make_read_item(read.planned, is_tensor ? state_[read.state_index].boxes[read.box].offsets : tensor::Dims(),
                        read.box, read.to);
}

py::list ReadPlan::items() const {
  py::list all;
  for (const Read& read : tensors_) all.append(item_of(read));
  for (const Read& read : objects_) all.append(item_of(read));
  return all;
}

}  // namespace bytecheckpoint::bridge
