// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind_checkpoint.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "csrc/bindings/errors.h"
#include "csrc/bindings/tree_caster.h"
#include "csrc/bindings/unlocked.h"
#include "csrc/engine/open_checkpoint.h"
#include "csrc/format/metadata_file.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;

std::unique_ptr<Checkpoint> open(const std::string& directory, engine::Scope rank, bool check_pickle,
                                 bool accept_rewritten) {
  const engine::OpenOptions options{rank, check_pickle, accept_rewritten};
  return std::make_unique<Checkpoint>(
      Checkpoint{value_unlocked([&] { return engine::open_checkpoint(directory, options); })});
}

std::vector<std::tuple<std::string, int64_t, uint32_t, std::string>> files_of(const Checkpoint& checkpoint) {
  std::vector<std::tuple<std::string, int64_t, uint32_t, std::string>> files;
  for (const format::FileEntry& file : checkpoint.manifest.files) {
    files.emplace_back(file.name, file.bytes, file.id.rank, base::to_hex(file.id.file_id));
  }
  return files;
}

/// (attributes of StorageMeta or None, is its checkpoint_id a path, version or None); None of our own checkpoints.
py::object foreign_of(const Checkpoint& checkpoint) {
  const auto& foreign = checkpoint.manifest.foreign;
  if (!foreign.has_value()) return py::none();
  return py::make_tuple(tree_to_python(foreign->storage_meta), foreign->checkpoint_id_is_path,
                        tree_to_python(foreign->version));
}

bool has_others_than(const Checkpoint& checkpoint, const py::dict& names) {
  return std::any_of(checkpoint.manifest.items.begin(), checkpoint.manifest.items.end(),
                     [&](const format::Item& item) { return !names.contains(to_text(item.fqn)); });
}

}  // namespace

const format::Chunk& Checkpoint::find_chunk(const std::string& fqn, const tensor::Dims& offsets, int64_t hint) const {
  const auto refuse = [&](const std::string& why) { raise_as("KeyMismatchError", "'" + fqn + "': " + why); };
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
      .def_static("open", &open, py::arg("directory"), py::kw_only(), py::arg("rank") = py::none(),
                  py::arg("check_pickle") = false, py::arg("accept_rewritten") = false)
      .def_property_readonly("save_id", [](const Checkpoint& c) { return base::to_hex(c.manifest.save_id); })
      .def_property_readonly("checkpoint_id", [](const Checkpoint& c) { return c.manifest.checkpoint_id; })
      .def_property_readonly("user_metadata", [](const Checkpoint& c) { return c.manifest.user_metadata; })
      .def_property_readonly("planner_data",
                             [](const Checkpoint& c) { return tree_to_python(c.manifest.planner_data); })
      .def_property_readonly("foreign", &foreign_of)
      .def(
          "has", [](const Checkpoint& c, const std::string& fqn) { return c.manifest.find(fqn) != nullptr; },
          py::arg("fqn"))
      .def("has_others_than", &has_others_than, py::arg("names"))
      .def("files", &files_of)
      .def("metadata_file", [](const Checkpoint& c) { return py::bytes(format::encode_metadata_file(c.manifest)); });
}

}  // namespace bytecheckpoint::bindings
