// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/dcp_objects.h"

#include <unordered_map>

#include "csrc/bridge/errors.h"
#include "csrc/bridge/gil.h"
#include "csrc/bridge/python_calls.h"

namespace bytecheckpoint::bridge {
namespace {

namespace py = pybind11;
using base::Code;
using base::Status;
using base::text;
using tensor::Dims;

/// Interned names, classes and constants, looked up once. They are never freed, but live as long as the interpreter.
struct Dcp {
  py::module_ torch = py::module_::import("torch");
  py::module_ metadata = py::module_::import("torch.distributed.checkpoint.metadata");
  py::module_ planner = py::module_::import("torch.distributed.checkpoint.planner");

  py::object size = torch.attr("Size");
  py::object strided = torch.attr("strided");
  py::object memory_formats[3] = {torch.attr("contiguous_format"), torch.attr("channels_last"),
                                  torch.attr("preserve_format")};
  py::object tensor_entry = metadata.attr("TensorStorageMetadata");
  py::object bytes_entry = metadata.attr("BytesStorageMetadata");
  py::object properties_class = metadata.attr("TensorProperties");
  py::object chunk_class = metadata.attr("ChunkStorageMetadata");
  py::object index_class = metadata.attr("MetadataIndex");
  py::object write_bytes = planner.attr("WriteItemType").attr("BYTE_IO");
  py::object write_tensor = planner.attr("WriteItemType").attr("TENSOR");
  py::object write_shard = planner.attr("WriteItemType").attr("SHARD");
  py::object write_item_class = planner.attr("WriteItem");
  py::object write_data_class = planner.attr("TensorWriteData");
  py::object read_bytes = planner.attr("LoadItemType").attr("BYTE_IO");
  py::object read_tensor = planner.attr("LoadItemType").attr("TENSOR");
  py::object read_item_class = planner.attr("ReadItem");
  std::unordered_map<PyObject*, const tensor::DTypeInfo*> dtypes;
  std::vector<py::object> dtype_objects;  // by code; null if this torch lacks the dtype

  py::object index = name("index"), type = name("type"), tensor_data = name("tensor_data"), fqn = name("fqn"),
             chunk = name("chunk"), chunks = name("chunks"), offset = name("offset"), offsets = name("offsets"),
             sizes = name("sizes"), properties = name("properties"), dtype = name("dtype"), layout = name("layout"),
             requires_grad = name("requires_grad"), memory_format = name("memory_format"),
             pin_memory = name("pin_memory"), size_name = name("size"), dest_index = name("dest_index"),
             dest_offsets = name("dest_offsets"), storage_index = name("storage_index"),
             storage_offsets = name("storage_offsets"), lengths = name("lengths"), held = name("held");

  Dcp() : dtype_objects(tensor::kLastDType + 1, py::none()) {
    for (uint8_t code = 1; code <= tensor::kLastDType; ++code) {
      const tensor::DTypeInfo* info = tensor::find_dtype(code);
      if (!py::hasattr(torch, info->name)) continue;
      dtype_objects[code] = torch.attr(info->name);
      dtypes[dtype_objects[code].ptr()] = info;
    }
  }

  static py::object name(const char* text) {
    return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(text));
  }
};

const Dcp& dcp() {
  return found_once<Dcp>();
}

/// Pauses the garbage collector while many objects are made that all stay alive: collections would find nothing, and
/// take most of the time.
class PauseGarbageCollection {
 public:
  PauseGarbageCollection() : was_enabled_(PyGC_Disable()) {}
  ~PauseGarbageCollection() {
    if (was_enabled_) PyGC_Enable();
  }
  PauseGarbageCollection(const PauseGarbageCollection&) = delete;
  PauseGarbageCollection& operator=(const PauseGarbageCollection&) = delete;

 private:
  const int was_enabled_;
};

py::object get(py::handle object, const py::object& name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

/// Sets an attribute as object.__setattr__ does, also of a frozen dataclass.
void set(const py::object& object, const py::object& name, const py::object& value) {
  if (PyObject_GenericSetAttr(object.ptr(), name.ptr(), value.ptr()) != 0) throw py::error_already_set();
}

/// Makes an instance of a dataclass without calling its `__init__`. The caller sets the attributes.
py::object make_instance(const py::object& of_class) {
  auto* type = reinterpret_cast<PyTypeObject*>(of_class.ptr());
  static PyObject* const no_arguments = PyTuple_New(0);
  PyObject* made = type->tp_new(type, no_arguments, nullptr);
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

Dims read_dims(py::handle value) {
  const py::object fast = py::reinterpret_steal<py::object>(PySequence_Fast(value.ptr(), "sizes or offsets wanted"));
  if (!fast) throw py::error_already_set();
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast.ptr());
  Dims dims(static_cast<size_t>(count));
  for (Py_ssize_t d = 0; d < count; ++d) {
    const long long size = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast.ptr(), d));
    if (size == -1 && PyErr_Occurred()) throw py::error_already_set();
    dims[static_cast<size_t>(d)] = size;
  }
  return dims;
}

py::object make_size(const Dims& dims) {
  py::tuple tuple(dims.size());
  for (size_t d = 0; d < dims.size(); ++d) tuple[d] = py::int_(dims[d]);
  return dcp().size(tuple);
}

[[noreturn]] void refuse(const std::string& fqn, const std::string& why) {
  raise(Status::make(Code::kInvalidArgument, text("'", fqn, "': ", why)));
}

std::string to_text(const py::object& value) {
  return py::str(value);
}

/// Checks and reads the dtype and layout of `TensorProperties`.
const tensor::DTypeInfo* read_dtype(const std::string& fqn, const py::object& properties) {
  const py::object dtype = get(properties, dcp().dtype);
  const py::object layout = get(properties, dcp().layout);
  const auto found = dcp().dtypes.find(dtype.ptr());
  if (!layout.is(dcp().strided) || found == dcp().dtypes.end()) {
    refuse(fqn, text("a tensor of ", to_text(dtype), ", ", to_text(layout), " cannot be stored"));
  }
  return found->second;
}

uint8_t read_memory_format(const std::string& fqn, const py::object& properties) {
  const py::object format = get(properties, dcp().memory_format);
  for (uint8_t code = 0; code < 3; ++code) {
    if (format.equal(dcp().memory_formats[code])) return code;
  }
  refuse(fqn, text("a tensor of ", to_text(format), " cannot be stored"));
}

/// Reads TensorStorageMetadata or TensorWriteData, which both have `properties` and `size`.
tensor::TensorInfo read_info(const std::string& fqn, py::handle described) {
  const py::object properties = get(described, dcp().properties);
  tensor::TensorInfo info;
  info.dtype = read_dtype(fqn, properties)->dtype;
  info.memory_format = read_memory_format(fqn, properties);
  info.requires_grad = get(properties, dcp().requires_grad).cast<bool>();
  info.pin_memory = get(properties, dcp().pin_memory).cast<bool>();
  info.sizes = read_dims(get(described, dcp().size_name));
  return info;
}

/// Makes TensorProperties. Raises if this torch lacks the dtype.
py::object make_properties(const std::string& fqn, const tensor::TensorInfo& info) {
  const py::object dtype = dcp().dtype_objects[static_cast<size_t>(info.dtype)];
  if (dtype.is_none()) {
    raise(Status::make(Code::kUnsupported,
                       text("'", fqn, "': this torch has no dtype ", tensor::find_dtype(info.dtype)->name)));
  }
  const py::object properties = make_instance(dcp().properties_class);
  set(properties, dcp().dtype, dtype);
  set(properties, dcp().layout, dcp().strided);
  set(properties, dcp().requires_grad, py::bool_(info.requires_grad));
  set(properties, dcp().memory_format, dcp().memory_formats[info.memory_format]);
  set(properties, dcp().pin_memory, py::bool_(info.pin_memory));
  return properties;
}

py::object make_chunk(const tensor::Box& box) {
  const py::object chunk = make_instance(dcp().chunk_class);
  set(chunk, dcp().offsets, make_size(box.offsets));
  set(chunk, dcp().sizes, make_size(box.sizes));
  return chunk;
}

py::object make_entry(const format::Item& item) {
  if (!item.is_tensor) return make_instance(dcp().bytes_entry);
  const py::object properties = make_properties(item.fqn, item.tensor);
  py::list chunks(item.chunks.size());
  for (size_t c = 0; c < item.chunks.size(); ++c) chunks[c] = make_chunk(item.chunks[c].box);
  const py::object entry = make_instance(dcp().tensor_entry);
  set(entry, dcp().properties, properties);
  set(entry, dcp().size_name, make_size(item.tensor.sizes));
  set(entry, dcp().chunks, chunks);
  return entry;
}

py::object make_tensor_item(const py::object& of_class, const std::string& fqn, const DeclaredTensor& declared,
                            const tensor::Box& box) {
  const py::object data = make_instance(dcp().write_data_class);
  set(data, dcp().chunk, make_chunk(box));
  set(data, dcp().properties, make_properties(fqn, declared.info));
  set(data, dcp().size_name, make_size(declared.info.sizes));
  const py::object item = make_instance(of_class);
  set(item, dcp().index, dcp().index_class(fqn, make_size(box.offsets)));
  set(item, dcp().type, declared.is_shard ? dcp().write_shard : dcp().write_tensor);
  set(item, dcp().tensor_data, data);
  return item;
}

/// Returns the items in the order of the state dict. Raises if their positions are not a permutation.
std::vector<const format::Item*> in_order(const format::Manifest& manifest) {
  std::vector<const format::Item*> ordered(manifest.items.size());
  for (const format::Item& item : manifest.items) {
    if (item.ordinal >= ordered.size() || ordered[item.ordinal] != nullptr) {
      raise(Status::make(Code::kCorrupt, "manifest: the positions of the items are not a permutation"));
    }
    ordered[item.ordinal] = &item;
  }
  return ordered;
}

}  // namespace

tensor::Box read_chunk(py::handle chunk) {
  return {read_dims(get(chunk, dcp().offsets)), read_dims(get(chunk, dcp().sizes))};
}

WriteItemFields read_write_item(py::handle item) {
  const py::object index = get(item, dcp().index);
  const py::object data = get(item, dcp().tensor_data);
  WriteItemFields planned;
  planned.fqn = get(index, dcp().fqn).cast<std::string>();
  planned.is_tensor = !data.is_none() && !get(item, dcp().type).is(dcp().write_bytes);
  if (planned.is_tensor) {
    planned.dtype = read_dtype(planned.fqn, get(data, dcp().properties));
    planned.box = read_chunk(get(data, dcp().chunk));
  }
  return planned;
}

DeclaredTensor read_declared_tensor(py::handle item) {
  const std::string fqn = get(get(item, dcp().index), dcp().fqn).cast<std::string>();
  const py::object data = get(item, dcp().tensor_data);
  return {read_info(fqn, data), get(item, dcp().type).is(dcp().write_shard)};
}

py::object make_bytes_item(const std::string& fqn) {
  const py::object item = make_instance(dcp().write_item_class);
  set(item, dcp().index, dcp().index_class(fqn));
  set(item, dcp().type, dcp().write_bytes);
  set(item, dcp().tensor_data, py::none());
  return item;
}

py::object make_write_item(const std::string& fqn, const DeclaredTensor& declared, const tensor::Box& box) {
  return make_tensor_item(dcp().write_item_class, fqn, declared, box);
}

py::object make_part_item(const std::string& fqn, const DeclaredTensor& declared, const tensor::Box& part,
                          const tensor::Box& held, const py::object& part_class) {
  const py::object item = make_tensor_item(part_class, fqn, {declared.info, /*is_shard=*/true}, part);
  set(item, dcp().held, make_chunk(held));
  return item;
}

PlannedRead read_read_item(py::handle item) {
  const py::object index = get(item, dcp().storage_index);
  PlannedRead planned;
  planned.fqn = get(index, dcp().fqn).cast<std::string>();
  planned.is_tensor = !get(item, dcp().type).is(dcp().read_bytes);
  const py::object offset = get(index, dcp().offset);
  if (!offset.is_none()) planned.chunk_offsets = read_dims(offset);
  const py::object hint = get(index, dcp().index);
  if (!hint.is_none()) planned.hint = hint.cast<int64_t>();
  if (planned.is_tensor) {
    planned.box = {read_dims(get(item, dcp().storage_offsets)), read_dims(get(item, dcp().lengths))};
  }
  return planned;
}

py::object make_read_item(const PlannedRead& read, const Dims& local, size_t box, const Dims& to) {
  const py::object item = make_instance(dcp().read_item_class);
  const bool is_tensor = read.is_tensor;
  set(item, dcp().type, is_tensor ? dcp().read_tensor : dcp().read_bytes);
  set(item, dcp().dest_index,
      is_tensor ? dcp().index_class(read.fqn, make_size(local), box) : dcp().index_class(read.fqn));
  set(item, dcp().dest_offsets, make_size(is_tensor ? to : Dims{0}));
  set(item, dcp().storage_index,
      is_tensor ? dcp().index_class(read.fqn, make_size(read.chunk_offsets), read.hint) : dcp().index_class(read.fqn));
  set(item, dcp().storage_offsets, make_size(is_tensor ? read.box.offsets : Dims{0}));
  set(item, dcp().lengths, make_size(is_tensor ? read.box.sizes : Dims{0}));
  return item;
}

std::vector<format::Item> read_state_dict_metadata(py::handle entries) {
  std::vector<format::Item> items;
  for (const auto& [key, entry] : py::reinterpret_borrow<py::dict>(entries)) {
    format::Item& item = items.emplace_back();
    item.fqn = key.cast<std::string>();
    item.ordinal = static_cast<uint32_t>(items.size() - 1);
    item.is_tensor = !is_instance(entry, dcp().bytes_entry);
    if (!item.is_tensor) {
      item.chunks.emplace_back();
      continue;
    }
    item.tensor = read_info(item.fqn, entry);
    for (const py::handle chunk : get(entry, dcp().chunks)) item.chunks.push_back({read_chunk(chunk), {}});
  }
  return items;
}

py::dict make_state_dict_metadata(const format::Manifest& manifest) {
  const PauseGarbageCollection quiet;
  py::dict entries;
  for (const format::Item* item : in_order(manifest)) entries[py::str(item->fqn)] = make_entry(*item);
  return entries;
}

py::dict make_storage_data(const format::Manifest& manifest, const py::object& storage_info) {
  const PauseGarbageCollection quiet;
  std::vector<py::str> names;
  for (const format::FileEntry& file : manifest.files) names.emplace_back(file.name);
  py::dict data;
  for (const format::Item* item : in_order(manifest)) {
    for (size_t c = 0; c < item->chunks.size(); ++c) {
      const format::Chunk& chunk = item->chunks[c];
      if (chunk.record.kind == format::RecordKind::kAbsent || chunk.record.kind == format::RecordKind::kRefused)
        continue;
      const py::object index = item->is_tensor ? dcp().index_class(item->fqn, make_size(chunk.box.offsets), c)
                                               : dcp().index_class(item->fqn);
      data[index] = storage_info(names[chunk.record.file], chunk.record.offset, chunk.record.bytes);
    }
  }
  return data;
}

}  // namespace bytecheckpoint::bridge
