// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/state_values.h"

#include "csrc/bridge/dcp_objects.h"
#include "csrc/bridge/dims_caster.h"
#include "csrc/bridge/errors.h"
#include "csrc/bridge/gil_yield.h"
#include "csrc/bridge/python_calls.h"
#include "csrc/bridge/tensor_parts.h"

namespace bytecheckpoint::bridge {
namespace {

namespace py = pybind11;

/// Names and classes, looked up once and never freed.
struct InternedNames {
  py::module_ of_tensors = py::module_::import("torch.distributed.tensor");
  py::object dtensor = of_tensors.attr("DTensor"), shard = of_tensors.attr("Shard"),
             replicate = of_tensors.attr("Replicate");
  py::object sharded_tensor = py::module_::import("torch.distributed._shard.sharded_tensor").attr("ShardedTensor");
  py::object local_chunks = py::module_::import("bytecheckpoint.tensors.chunks").attr("LocalChunks");
  py::object offsets = py::str("offsets"), tensors = py::str("tensors"), must_agree = py::str("must_agree");
  py::object local_tensor = py::str("_local_tensor"), device_mesh = py::str("device_mesh"),
             placements = py::str("placements"), dim = py::str("dim");
};

const InternedNames& names() {
  return found_once<InternedNames>();
}

/// Whether the value is of a builtin type without attributes, which DCP always stores as bytes.
bool is_builtin(py::handle value) {
  PyObject* v = value.ptr();
  return v == Py_None || PyBool_Check(v) || PyLong_CheckExact(v) || PyFloat_CheckExact(v) || PyUnicode_CheckExact(v) ||
         PyList_CheckExact(v) || PyTuple_CheckExact(v) || PyDict_CheckExact(v);
}

/// Returns the key as text. Raises InvalidPlanError if it is no text, or not valid UTF-8.
std::string name_of(py::handle key) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_Check(key.ptr()) ? PyUnicode_AsUTF8AndSize(key.ptr(), &size) : nullptr;
  if (text != nullptr) return {text, static_cast<size_t>(size)};
  PyErr_Clear();
  raise(base::Status::make(base::Code::kInvalidArgument,
                           "a key of the state dict is not UTF-8 text: " +
                               py::reinterpret_steal<py::str>(PyObject_ASCII(key.ptr())).cast<std::string>()));
}

bool has_chunks(py::handle value) {
  return is_instance(value, names().sharded_tensor) || py::hasattr(value, "__create_chunk_list__");
}

}  // namespace

bool is_dtensor(py::handle value) {
  return reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())) == names().dtensor.ptr();
}

py::object local_of(py::handle dtensor) {
  return dtensor.attr(names().local_tensor);
}

bool is_local_chunks(py::handle value) {
  return reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())) == names().local_chunks.ptr();
}

py::tuple tensors_of_chunks(py::handle chunks) {
  return chunks.attr(names().tensors);
}

py::object StateValue::local(size_t box) const {
  if (kind == Kind::kPlain) return value;
  if (kind == Kind::kDTensor) return local_of(value);
  return is_local_chunks(value) ? py::object(tensors_of_chunks(value)[box]) : part_of(value, box);
}

StateScanner::StateScanner(py::object chunks_of, Use use)
    : chunks_of_(std::move(chunks_of)),
      read_only_(use == Use::kFill ? std::optional(base::ReadOnlyMemory()) : std::nullopt) {}

std::vector<StateValue> StateScanner::scan(const py::dict& flat) {
  std::vector<StateValue> state;
  state.reserve(flat.size());
  GilYield gil_yield;
  for (const auto& [key, value] : flat) {
    gil_yield.take();
    StateValue& state_value = state.emplace_back();
    state_value.fqn = name_of(key);
    state_value.key = py::reinterpret_borrow<py::object>(key);
    state_value.value = py::reinterpret_borrow<py::object>(value);
    if (is_builtin(value)) continue;
    if (!is_tensor(value.ptr()) && !has_chunks(value)) continue;
    try {
      read_tensor(&state_value);
    } catch (const std::exception&) {
      raise_for_value(state_value.fqn, value);
    }
  }
  return state;
}

/// Checks the memory of a plain tensor that is, or is part of, a value, if it is to be filled. What is read from it is
/// checked when it is read: here each storage would have to be fetched from memory once more.
void StateScanner::check(const StateValue& state_value, py::handle tensor) {
  if (!read_only_.has_value()) return;
  base::Status checked = check_memory(tensor.ptr(), &*read_only_);
  if (!checked.is_ok()) raise(std::move(checked).with_context(base::text("'", state_value.fqn, "'")));
}

void StateScanner::read_tensor(StateValue* state_value) {
  state_value->kind = StateValue::Kind::kOther;
  const bool sharded = is_dtensor(state_value->value);
  if (is_local_chunks(state_value->value)) {
    read_chunks(state_value);
    return;
  }
  if (sharded || is_plain_tensor(state_value->value.ptr())) {
    state_value->facts = facts_of_tensor(state_value->value.ptr());
    const bool is_direct = state_value->facts.dtype != tensor::DType::kNone && state_value->facts.is_strided;
    const py::object local = sharded ? local_of(state_value->value) : state_value->value;
    const bool is_plain = is_plain_tensor(local.ptr());
    if (is_plain) check(*state_value, local);
    if (is_direct && is_marked_as_parts(state_value->value)) {
      read_parts(state_value);
      return;
    }
    if (is_direct && !sharded) {
      state_value->kind = StateValue::Kind::kPlain;
      state_value->boxes = {tensor::whole(state_value->facts.sizes)};
      return;
    }
    if (is_direct && is_plain) {
      state_value->kind = StateValue::Kind::kDTensor;
      state_value->boxes = boxes_of_dtensor(state_value->value, state_value->facts.sizes);
      return;
    }
  }
  state_value->boxes = ask_dcp(state_value->value);
}

void StateScanner::read_chunks(StateValue* state_value) {
  state_value->kind = StateValue::Kind::kChunks;
  state_value->facts = facts_of_tensor(state_value->value.ptr());
  const py::tuple offsets = state_value->value.attr(names().offsets);
  const py::tuple tensors = tensors_of_chunks(state_value->value);
  for (size_t i = 0; i < tensors.size(); ++i) {
    check(*state_value, tensors[i]);
    state_value->boxes.push_back(
        {offsets[i].cast<tensor::Dims>(), facts_of_tensor(py::object(tensors[i]).ptr()).sizes});
  }
}

void StateScanner::read_parts(StateValue* state_value) {
  state_value->kind = StateValue::Kind::kChunks;
  state_value->boxes = ask_dcp(state_value->value);  // DCP checks what the tensor claims
  state_value->facts.sizes = global_shape_of_parts(state_value->value);
}

const std::vector<tensor::Box>& StateScanner::boxes_of_dtensor(py::handle dtensor, const tensor::Dims& sizes) {
  const py::object mesh = attribute(dtensor, names().device_mesh);
  const py::tuple placements = attribute(dtensor, names().placements);
  // The mesh is identified by its address, which it keeps while the state lives: comparing meshes would cost more than
  // all else here.
  std::vector<int64_t> key = {reinterpret_cast<intptr_t>(mesh.ptr())};
  for (const py::handle placement : placements) add_placement(placement, &key);
  key.insert(key.end(), sizes.begin(), sizes.end());
  const auto known = known_.find(key);
  if (known != known_.end()) return known->second;
  const bool is_in_mesh = !call_python(attribute(mesh, py::str("get_coordinate"))).is_none();
  return known_.emplace(std::move(key), is_in_mesh ? ask_dcp(dtensor) : std::vector<tensor::Box>()).first->second;
}

void StateScanner::add_placement(py::handle placement, std::vector<int64_t>* key) {
  enum Kind : int64_t { kReplicate, kShard, kOther };
  // Placements hash and compare themselves in Python, which would be a quarter of all the work for a DTensor.
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(placement.ptr()));
  if (type == names().replicate.ptr()) {
    key->insert(key->end(), {kReplicate, 0});
  } else if (type == names().shard.ptr()) {
    key->insert(key->end(), {kShard, placement.attr(names().dim).cast<int64_t>()});
  } else {
    key->insert(key->end(), {kOther, number_in(placements_, placement)});
  }
}

std::vector<tensor::Box> StateScanner::ask_dcp(py::handle tensor) const {
  std::vector<tensor::Box> boxes;
  for (const py::handle chunk : call_python(chunks_of_, tensor)) boxes.push_back(read_chunk(chunk));
  return boxes;
}

namespace {

/// Adds a tensor that is not plain to `found`; nothing for other values.
void note_other_tensor(py::handle key, py::handle value, SpecialTensors* found) {
  if (is_dtensor(value)) {
    if (!is_plain_tensor(local_of(value).ptr())) found->subclasses.append(key);
  } else if (is_local_chunks(value)) {
    if (value.attr(names().must_agree).cast<bool>()) found->copies.append(key);
  } else if (is_instance(value, names().sharded_tensor)) {
    found->has_sharded_tensor = true;
    return;
  } else if (is_tensor(value.ptr())) {
    found->subclasses.append(key);
  } else {
    return;
  }
  found->has_meta_tensor = found->has_meta_tensor || is_meta_tensor(value.ptr());
}

}  // namespace

SpecialTensors find_special_tensors(const py::dict& flat) {
  SpecialTensors found;
  for (const auto& [key, value] : flat) {
    if (is_builtin(value)) continue;
    if (!is_plain_tensor(value.ptr())) {
      note_other_tensor(key, value, &found);
    } else if (!found.has_meta_tensor) {  // a plain tensor, as nearly all are: costs nothing
      found.has_meta_tensor = is_meta_tensor(value.ptr());
    }
  }
  return found;
}

}  // namespace bytecheckpoint::bridge
