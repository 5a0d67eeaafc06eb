// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/local_state.h"

#include <optional>
#include <string_view>

#include "csrc/base/bytes.h"
#include "csrc/bridge/drop.h"
#include "csrc/bridge/errors.h"
#include "csrc/bridge/gil_yield.h"
#include "csrc/bridge/ordered_lookup.h"
#include "csrc/bridge/tree_caster.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/planner/inventory_blob.h"

namespace bytecheckpoint::bridge {
namespace {

namespace py = pybind11;
using planner::EntryKind;

/// Returns the key as UTF-8, which nearly all keys are; nothing for other keys.
std::optional<std::string_view> text_of(PyObject* key) {
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_CheckExact(key) ? PyUnicode_AsUTF8AndSize(key, &size) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  return std::string_view(text, static_cast<size_t>(size));
}

/// Encodes the path through nested dicts; empty if the path is just the name.
std::string encode_path(const std::string& fqn, py::handle path) {
  const py::tuple keys(py::reinterpret_borrow<py::object>(path));
  if (keys.size() == 1 && PyUnicode_Check(keys[0].ptr()) && keys[0].cast<std::string>() == fqn) return "";
  base::ByteWriter out;
  format::encode_container(format::Tree::Kind::kTuple, keys.size(), &out);
  for (const py::handle key : keys) {
    const std::optional<std::string_view> text = text_of(key.ptr());
    if (!text.has_value()) {
      return tree_from_python(path).bytes();
    }
    format::encode_text(format::Tree::Kind::kString, *text, &out);
  }
  return out.take();
}

/// Returns what TensorProperties would say about a tensor that is a piece of `whole`.
tensor::TensorInfo info_of(py::handle local, const TensorFacts& whole) {
  tensor::TensorInfo info;
  info.dtype = whole.dtype;
  info.requires_grad = whole.requires_grad;
  info.pin_memory = is_pinned(local.ptr());
  info.sizes = whole.sizes;
  return info;
}

}  // namespace

/// The paths through nested dicts, by key of the flat state.
class LocalState::Paths {
 public:
  /// \param mappings  A dict, or what a planner has in its place; None: there are no paths.
  explicit Paths(const py::object& mappings) : mappings_(mappings) {
    if (PyDict_CheckExact(mappings.ptr())) in_dict_.emplace(mappings);
  }

  /// Returns the path; null if there is none.
  py::object find(py::handle key) {
    if (mappings_.is_none()) return {};
    if (in_dict_.has_value()) return py::reinterpret_borrow<py::object>(in_dict_->find(key.ptr()));
    auto path = py::reinterpret_steal<py::object>(PyObject_GetItem(mappings_.ptr(), key.ptr()));
    if (!path && PyErr_ExceptionMatches(PyExc_KeyError) == 0) throw py::error_already_set();
    PyErr_Clear();
    return path;
  }

 private:
  const py::object mappings_;
  std::optional<OrderedLookup> in_dict_;
};

LocalState::LocalState(const py::dict& flat, const py::object& mappings, const py::object& chunks_of,
                       const py::object& items_of, bool can_split)
    : state_(StateScanner(chunks_of, StateScanner::Use::kRead).scan(flat)) {
  std::vector<Declared> declared;
  declared.reserve(state_.size());
  GilYield gil_yield;
  Paths paths(mappings);
  for (StateValue& state_value : state_) {
    gil_yield.take();
    declared.push_back(declare(&paths, items_of, &state_value));
  }
  run_unlocked([&] { return take_inventory(declared, can_split); });
}

LocalState::LocalState(planner::Inventory inventory) : inventory_(std::move(inventory)) {}

LocalState::~LocalState() {
  drop_in_breaths(&state_);
}

LocalState::Declared LocalState::declare(Paths* paths, const py::object& items_of, StateValue* state_value) {
  Declared declared;
  switch (state_value->kind) {
    case StateValue::Kind::kObject:
      break;
    case StateValue::Kind::kPlain:
      declared.kind = EntryKind::kTensor;
      declared.info = info_of(state_value->value, state_value->facts);
      break;
    case StateValue::Kind::kDTensor:
      declared.kind = EntryKind::kShard;
      declared.info = info_of(state_value->local(0), state_value->facts);
      break;
    case StateValue::Kind::kChunks:
      declared.kind = EntryKind::kShard;
      if (!state_value->boxes.empty()) declared.info = info_of(state_value->local(0), state_value->facts);
      break;
    case StateValue::Kind::kOther:
      try {
        declared.kind = ask_dcp(items_of, state_value, &declared.info);
      } catch (const std::exception&) {
        raise_for_value(state_value->fqn, state_value->value);
      }
      break;
  }
  declared.is_here = state_value->kind == StateValue::Kind::kOther
                         ? !state_value->items.empty()
                         : declared.kind == EntryKind::kBytes || !state_value->boxes.empty();
  if (!declared.is_here) return declared;
  if (const py::object path = paths->find(state_value->key)) declared.path = encode_path(state_value->fqn, path);
  return declared;
}

namespace {

/// Returns the numbers of the boxes that are stored of a value in chunks: those with elements, or all if the tensor has
/// none. An empty box may begin where another one does, and readers tell the boxes of a tensor by where they begin.
std::vector<size_t> stored_boxes(const StateValue& state_value) {
  const bool is_empty = !tensor::has_elements(tensor::whole(state_value.facts.sizes));
  std::vector<size_t> numbers;
  for (size_t i = 0; i < state_value.boxes.size(); ++i) {
    if (is_empty || tensor::has_elements(state_value.boxes[i])) numbers.push_back(i);
  }
  return numbers;
}

}  // namespace

/// Builds the inventory. Needs no GIL.
base::Status LocalState::take_inventory(const std::vector<Declared>& declared, bool can_split) {
  planner::InventoryBuilder builder(0);  // who merges the inventories knows the ranks
  for (size_t number = 0; number < declared.size(); ++number) {
    const Declared& of = declared[number];
    if (!of.is_here) continue;
    const StateValue& state_value = state_[number];
    // Nothing keeps the copies of a plain tensor equal. Parts of different copies would make a tensor that no rank had.
    const bool is_kept_equal =
        state_value.kind == StateValue::Kind::kDTensor || state_value.kind == StateValue::Kind::kChunks;
    const bool can_split_it = can_split && is_kept_equal;
    if (state_value.kind == StateValue::Kind::kChunks) {
      const std::vector<size_t> stored = stored_boxes(state_value);
      if (stored.empty()) continue;
      std::vector<tensor::Box> boxes;
      for (const size_t i : stored) boxes.push_back(state_value.boxes[i]);
      std::vector<size_t> order;
      BCP_RETURN_IF_ERROR(builder.add(state_value.fqn, of.kind, of.path, of.info, can_split_it, boxes, &order));
      for (size_t& i : order) i = stored[i];
      orders_.emplace(static_cast<uint32_t>(value_of_entry_.size()), std::move(order));
    } else {
      BCP_RETURN_IF_ERROR(builder.add(state_value.fqn, of.kind, of.path, of.info, can_split_it, state_value.boxes));
    }
    value_of_entry_.push_back(number);
  }
  BCP_ASSIGN_OR_RETURN(inventory_, builder.finish());
  return base::Status::ok();
}

EntryKind LocalState::ask_dcp(const py::object& items_of, StateValue* state_value, tensor::TensorInfo* info) {
  EntryKind kind = EntryKind::kBytes;
  state_value->boxes.clear();
  for (const py::handle item : items_of(state_value->fqn, state_value->value)) {
    const WriteItemFields planned = read_write_item(item);
    state_value->items.push_back(py::reinterpret_borrow<py::object>(item));
    if (!planned.is_tensor) continue;
    const DeclaredTensor declared = read_declared_tensor(item);
    kind = declared.is_shard ? EntryKind::kShard : EntryKind::kTensor;
    *info = declared.info;
    state_value->boxes.push_back(planned.box);
  }
  return kind;
}

int64_t LocalState::num_bytes() const {
  int64_t bytes = 0;
  for (const planner::Entry& entry : inventory_.entries) {
    for (uint32_t b = 0; entry.is_tensor() && b < entry.num_boxes; ++b) bytes += inventory_.box_bytes(entry, b);
  }
  return bytes;
}

std::string LocalState::blob() const {
  return planner::encode_inventory(inventory_);
}

py::object LocalState::item(uint32_t entry_number, uint32_t number, const tensor::Box& part,
                            const py::object& part_class) const {
  const planner::Entry& entry = inventory_.entries[entry_number];
  const std::string fqn(inventory_.fqn(entry));
  const tensor::Box box = entry.is_tensor() ? inventory_.box(entry, number) : tensor::Box();
  if (!state_.empty() && value_of(entry_number).kind == StateValue::Kind::kOther) {
    const StateValue& value = value_of(entry_number);
    for (size_t i = 0; i < value.items.size(); ++i) {
      if (!entry.is_tensor() || value.boxes[i] == box) return value.items[i];
    }
  }
  if (!entry.is_tensor()) return make_bytes_item(fqn);
  const bool is_shard = entry.kind == EntryKind::kShard;
  const DeclaredTensor declared{inventory_.info(entry), is_shard};
  if (part == box) return make_write_item(fqn, declared, box);
  return make_part_item(fqn, declared, part, box, part_class);
}

py::list LocalState::items() const {
  py::list all;
  for (uint32_t e = 0; e < inventory_.entries.size(); ++e) {
    const planner::Entry& entry = inventory_.entries[e];
    if (!entry.is_tensor()) all.append(item(e, 0, {}, py::none()));
    for (uint32_t b = 0; entry.is_tensor() && b < entry.num_boxes; ++b) {
      all.append(item(e, b, inventory_.box(entry, b), py::none()));
    }
  }
  return all;
}

}  // namespace bytecheckpoint::bridge
