// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind_checkpoint.h"

#include <pybind11/stl.h>

#include "csrc/bindings/errors.h"
#include "csrc/bindings/tree_caster.h"
#include "csrc/engine/assemble.h"
#include "csrc/engine/open_checkpoint.h"
#include "csrc/format/metadata_file.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using tensor::Dims;

/// (fqn, dtype name or "" for bytes, requires_grad, pin_memory, memory_format, sizes, [(offsets, sizes), ...])
using PlannedItem = std::tuple<std::string, std::string, bool, bool, uint8_t, Dims, std::vector<std::pair<Dims, Dims>>>;

py::tuple to_tuple(const Dims& dims) {
  py::tuple tuple(dims.size());
  for (size_t d = 0; d < dims.size(); ++d) tuple[d] = py::int_(dims[d]);
  return tuple;
}

format::Item planned_item(PlannedItem& planned, uint32_t ordinal) {
  auto& [fqn, dtype, requires_grad, pin_memory, memory_format, sizes, boxes] = planned;
  format::Item item;
  item.fqn = std::move(fqn);
  item.ordinal = ordinal;
  item.is_tensor = !dtype.empty();
  if (item.is_tensor) {
    const tensor::DTypeInfo* info = tensor::find_dtype(dtype);
    if (info == nullptr) throw py::type_error("'" + item.fqn + "': dtype " + dtype + " is not in the format");
    item.tensor = {info->dtype, requires_grad, pin_memory, memory_format, std::move(sizes)};
    for (auto& [offsets, box_sizes] : boxes) item.chunks.push_back({{std::move(offsets), std::move(box_sizes)}, {}});
  } else {
    item.chunks.emplace_back();
  }
  return item;
}

/// Joins what was planned with what all ranks wrote.
std::unique_ptr<Checkpoint> assemble(const std::string& save_id, std::string checkpoint_id,
                                     std::vector<PlannedItem> items, const std::vector<py::bytes>& results,
                                     py::handle planner_data, std::string user_metadata) {
  auto checkpoint = std::make_unique<Checkpoint>();
  format::Manifest& manifest = checkpoint->manifest;
  if (!base::id_from_hex(save_id, &manifest.save_id)) throw py::value_error("save id: 32 hex digits wanted");
  manifest.checkpoint_id = std::move(checkpoint_id);
  manifest.planner_data = tree_from_python(planner_data);
  manifest.user_metadata = std::move(user_metadata);
  for (PlannedItem& item : items) {
    manifest.items.push_back(planned_item(item, static_cast<uint32_t>(manifest.items.size())));
  }
  std::vector<format::WriteResult> written;
  for (const py::bytes& result : results) {
    written.push_back(value_or_raise(format::decode_write_result(std::string_view(result))));
  }
  const py::gil_scoped_release unlocked;
  auto joined = engine::assemble_manifest(std::move(manifest), written);
  if (!joined.is_ok()) {
    const py::gil_scoped_acquire locked;
    raise(joined.status());
  }
  checkpoint->manifest = std::move(joined.value());
  return checkpoint;
}

/// [(fqn, dtype name or "", requires_grad, pin_memory, memory_format, sizes,
///   [(offsets, sizes, file name or "" if it has no place, offset, bytes), ...]), ...] in the order of the state dict.
py::list items_of(const Checkpoint& checkpoint) {
  const format::Manifest& manifest = checkpoint.manifest;
  std::vector<const format::Item*> ordered(manifest.items.size());
  for (const format::Item& item : manifest.items) {
    if (item.ordinal < ordered.size()) ordered[item.ordinal] = &item;
  }
  std::vector<py::str> names;
  for (const format::FileEntry& file : manifest.files) names.emplace_back(file.name);
  py::list out;
  for (const format::Item* item : ordered) {
    if (item == nullptr) {
      raise(base::Status::make(base::Code::kCorrupt, "manifest: positions of the items are no permutation"));
    }
    py::list chunks;
    for (const format::Chunk& chunk : item->chunks) {
      const bool is_absent = chunk.record.kind == format::RecordKind::kAbsent;
      chunks.append(py::make_tuple(to_tuple(chunk.box.offsets), to_tuple(chunk.box.sizes),
                                   is_absent ? py::str() : names[chunk.record.file], chunk.record.offset,
                                   chunk.record.bytes));
    }
    const tensor::DTypeInfo* info = tensor::find_dtype(item->tensor.dtype);
    out.append(py::make_tuple(item->fqn, info == nullptr ? "" : info->name, item->tensor.requires_grad,
                              item->tensor.pin_memory, item->tensor.memory_format, to_tuple(item->tensor.sizes),
                              chunks));
  }
  return out;
}

std::vector<std::tuple<std::string, int64_t, uint32_t, std::string>> files_of(const Checkpoint& checkpoint) {
  std::vector<std::tuple<std::string, int64_t, uint32_t, std::string>> files;
  for (const format::FileEntry& file : checkpoint.manifest.files) {
    files.emplace_back(file.name, file.bytes, file.id.rank, base::to_hex(file.id.file_id));
  }
  return files;
}

std::unique_ptr<Checkpoint> open(const std::string& directory, bool check_pickle) {
  auto manifest = [&] {
    const py::gil_scoped_release unlocked;
    return engine::open_checkpoint(directory, engine::kMetadataName, check_pickle);
  }();
  return std::make_unique<Checkpoint>(Checkpoint{value_or_raise(std::move(manifest))});
}

}  // namespace

const format::Chunk& Checkpoint::find_chunk(const std::string& fqn, const Dims& offsets, int64_t hint) const {
  const auto refuse = [&](const std::string& why) {
    const py::object error =
        py::module_::import("bytecheckpoint.errors").attr("KeyMismatchError")("'" + fqn + "': " + why);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    throw py::error_already_set();
  };
  const format::Item* item = manifest.find(fqn);
  if (item == nullptr) refuse("wanted, but the checkpoint has no such key");
  const auto& chunks = item->chunks;
  if (hint >= 0 && hint < static_cast<int64_t>(chunks.size()) && chunks[hint].box.offsets == offsets) {
    return chunks[hint];
  }
  for (const format::Chunk& chunk : chunks) {
    if (chunk.box.offsets == offsets) return chunk;
  }
  refuse("wanted the chunk at " + tensor::to_text(offsets) + ", the checkpoint has none there");
  std::abort();  // unreachable: refuse throws
}

void bind_checkpoint(py::module_& m) {
  py::class_<Checkpoint>(m, "Checkpoint", py::module_local())
      .def_static("open", &open, py::arg("directory"), py::arg("check_pickle"))
      .def_static("assemble", &assemble, py::arg("save_id"), py::arg("checkpoint_id"), py::arg("items"),
                  py::arg("results"), py::arg("planner_data"), py::arg("user_metadata"))
      .def_property_readonly("save_id", [](const Checkpoint& c) { return base::to_hex(c.manifest.save_id); })
      .def_property_readonly("checkpoint_id", [](const Checkpoint& c) { return c.manifest.checkpoint_id; })
      .def_property_readonly("user_metadata", [](const Checkpoint& c) { return c.manifest.user_metadata; })
      .def_property_readonly("planner_data",
                             [](const Checkpoint& c) { return tree_to_python(c.manifest.planner_data); })
      .def("items", &items_of)
      .def("files", &files_of)
      .def(
          "record",
          [](const Checkpoint& c, const std::string& fqn, const Dims& offsets, int64_t hint) {
            const format::Chunk& chunk = c.find_chunk(fqn, offsets, hint);
            const tensor::DTypeInfo* info = tensor::find_dtype(chunk.record.stored_dtype);
            return py::make_tuple(info == nullptr ? "" : info->name, to_tuple(chunk.box.sizes), chunk.record.bytes);
          },
          py::arg("fqn"), py::arg("offsets"), py::arg("hint"))
      .def("metadata_file", [](const Checkpoint& c) { return py::bytes(format::encode_metadata_file(c.manifest)); });
}

}  // namespace bytecheckpoint::bindings
