// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind_checkpoint.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "csrc/bindings/errors.h"
#include "csrc/bindings/tree_caster.h"
#include "csrc/bindings/unlocked.h"
#include "csrc/engine/coverage.h"
#include "csrc/format/metadata_file.h"
#include "csrc/io/directory.h"
#include "csrc/io/file.h"
#include "csrc/io/patience.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;

/// Bytes of the commit mark, or 0 if that cannot be told: then opening it will say why.
int64_t mark_bytes(const std::string& directory, engine::Scope rank) {
  const base::Result<io::File> mark = io::File::open(directory, engine::mark_name(rank), false);
  if (!mark.is_ok()) return 0;
  const base::Result<int64_t> size = mark.value().size();
  return size.is_ok() ? size.value() : 0;
}

struct Opened {
  format::Manifest manifest;
  std::optional<engine::ManifestReader> reader;  // of one that is read in parts
};

base::Result<Opened> open_slowly(const std::string& directory, const engine::OpenOptions& options,
                                 int64_t max_whole_bytes, double io_timeout_s) {
  if (mark_bytes(directory, options.scope) > max_whole_bytes) {
    auto reader = engine::ManifestReader::open(directory, options.scope, io_timeout_s);
    // Others' metadata can only be read whole.
    if (reader.is_ok()) {
      BCP_ASSIGN_OR_RETURN(format::Manifest head, reader.value().read_head());
      return Opened{std::move(head), std::move(reader.value())};
    }
    if (reader.status().code() != base::Code::kUnsupported) return reader.status();
  }
  BCP_ASSIGN_OR_RETURN(format::Manifest manifest, engine::open_checkpoint(directory, options));
  return Opened{std::move(manifest), {}};
}

CheckpointHolder open(const std::string& directory, engine::Scope rank, bool check_pickle, bool accept_rewritten,
                      int64_t max_whole_bytes, double io_timeout_s) {
  return CheckpointHolder(new Checkpoint(
      Checkpoint::open(directory, {rank, check_pickle, accept_rewritten}, max_whole_bytes, io_timeout_s)));
}

std::vector<std::tuple<std::string, int64_t, uint32_t, std::string>> files_of(const Checkpoint& checkpoint) {
  std::vector<std::tuple<std::string, int64_t, uint32_t, std::string>> files;
  for (const format::FileEntry& file : checkpoint.head().files) {
    files.emplace_back(file.name, file.bytes, file.id.rank, base::to_hex(file.id.file_id));
  }
  return files;
}

py::tuple ints_of(const tensor::Dims& dims) {
  py::tuple out(dims.size());
  for (size_t i = 0; i < dims.size(); ++i) out[i] = py::int_(dims[i]);
  return out;
}

/// Of each item: (fqn, dtype or None of what is no tensor, sizes, bytes of an element or 0 if its dtype is opaque,
/// bytes of its records, number of its chunks, whether it is partial on purpose).
py::list contents_of(const Checkpoint& checkpoint) {
  py::list out;
  for (const format::Item& item : checkpoint.whole().items) {
    int64_t record_bytes = 0;
    for (const format::Chunk& chunk : item.chunks) record_bytes += chunk.record.bytes;
    const tensor::DTypeInfo* dtype = item.is_tensor ? tensor::find_dtype(item.tensor.dtype) : nullptr;
    out.append(py::make_tuple(to_text(item.fqn), dtype == nullptr ? py::object(py::none()) : py::str(dtype->name),
                              ints_of(item.tensor.sizes), dtype == nullptr ? 0 : dtype->itemsize_bytes, record_bytes,
                              item.chunks.size(), item.is_partial));
  }
  return out;
}

/// Names of the tensors of which some elements are in no chunk.
py::list tensors_with_gaps(const Checkpoint& checkpoint) {
  const format::Manifest& manifest = checkpoint.whole();
  std::vector<const format::Item*> found = unlocked([&] {
    engine::CoverageCheck check;
    std::vector<const format::Item*> with_gaps;
    for (const format::Item& item : manifest.items) {
      if (check.has_gap(item)) with_gaps.push_back(&item);
    }
    return with_gaps;
  });
  py::list out;
  for (const format::Item* item : found) out.append(to_text(item->fqn));
  return out;
}

/// Of each item a list of its chunks: (offsets, sizes, file or None if it has no place, offset of the record, its
/// bytes).
py::list chunks_of(const Checkpoint& checkpoint) {
  const format::Manifest& manifest = checkpoint.whole();
  std::vector<py::str> names;
  for (const format::FileEntry& file : manifest.files) names.push_back(to_text(file.name));
  py::list out;
  for (const format::Item& item : manifest.items) {
    py::list chunks;
    for (const format::Chunk& chunk : item.chunks) {
      const bool is_absent = chunk.record.kind == format::RecordKind::kAbsent;
      chunks.append(py::make_tuple(ints_of(chunk.box.offsets), ints_of(chunk.box.sizes),
                                   is_absent ? py::object(py::none()) : names[chunk.record.file], chunk.record.offset,
                                   chunk.record.bytes));
    }
    out.append(std::move(chunks));
  }
  return out;
}

/// (attributes of StorageMeta or None, is its checkpoint_id a path, version or None); None of our own checkpoints.
py::object foreign_of(const Checkpoint& checkpoint) {
  const auto& foreign = checkpoint.head().foreign;
  if (!foreign.has_value()) return py::none();
  return py::make_tuple(tree_to_python(foreign->storage_meta), foreign->checkpoint_id_is_path,
                        tree_to_python(foreign->version));
}

bool has(const Checkpoint& checkpoint, const std::string& fqn) {
  engine::ManifestReader* parts = checkpoint.parts();
  if (parts == nullptr) return checkpoint.whole().find(fqn) != nullptr;
  return value_or_raise(parts->find_item(fqn)).has_value();
}

/// Of all items, in an order that is the same for all who read this checkpoint.
py::list names_of(const Checkpoint& checkpoint) {
  py::list out;
  if (engine::ManifestReader* parts = checkpoint.parts(); parts != nullptr) {
    for (const std::string& name : value_unlocked([&] { return parts->read_names(); })) out.append(to_text(name));
    return out;
  }
  for (const format::Item& item : checkpoint.whole().items) out.append(to_text(item.fqn));
  return out;
}

bool has_others_than(const Checkpoint& checkpoint, const py::dict& names) {
  if (const engine::ManifestReader* parts = checkpoint.parts(); parts != nullptr) {
    if (parts->view().num_items() > names.size()) return true;  // without a look at any of them
    uint64_t num_found = 0;
    for (const auto& [name, value] : names) num_found += has(checkpoint, py::str(name).cast<std::string>()) ? 1 : 0;
    return parts->view().num_items() > num_found;
  }
  const std::vector<format::Item>& items = checkpoint.whole().items;
  return std::any_of(items.begin(), items.end(),
                     [&](const format::Item& item) { return !names.contains(to_text(item.fqn)); });
}

}  // namespace

Checkpoint Checkpoint::open(const std::string& directory, const engine::OpenOptions& options, int64_t max_whole_bytes,
                            double io_timeout_s) {
  Opened opened = value_unlocked([&] {
    return io::run_patiently(io_timeout_s, "open", directory, [directory, options, max_whole_bytes, io_timeout_s] {
      return open_slowly(directory, options, max_whole_bytes, io_timeout_s);
    });
  });
  Checkpoint checkpoint(std::move(opened.manifest));
  if (opened.reader.has_value()) {
    checkpoint.parts_ = Parts{std::move(*opened.reader), directory, options, io_timeout_s};
  }
  return checkpoint;
}

const format::Manifest& Checkpoint::whole() const {
  if (!parts_.has_value()) return *manifest_;
  format::Manifest all = value_unlocked([&] {
    return io::run_patiently(parts_->io_timeout_s, "open", parts_->directory,
                             [directory = parts_->directory, options = parts_->options] {
                               return engine::open_checkpoint(directory, options);
                             });
  });
  if (all.save_id != manifest_->save_id) {
    raise(base::Status::make(base::Code::kChanged,
                             base::text("open(", parts_->directory, "): a newer commit replaced the checkpoint"),
                             parts_->directory));
  }
  manifest_ = std::make_shared<format::Manifest>(std::move(all));
  parts_.reset();
  return *manifest_;
}

const format::Chunk& Checkpoint::find_chunk(const std::string& fqn, const tensor::Dims& offsets, int64_t hint) const {
  const auto refuse = [&](const std::string& why) { raise_as("KeyMismatchError", "'" + fqn + "': " + why); };
  const format::Item* item = whole().find(fqn);
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
  py::class_<Checkpoint, CheckpointHolder>(m, "Checkpoint", py::module_local())
      .def_static("open", &open, py::arg("directory"), py::kw_only(), py::arg("rank") = py::none(),
                  py::arg("check_pickle") = false, py::arg("accept_rewritten") = false,
                  py::arg("max_whole_bytes") = INT64_MAX, py::arg("io_timeout_s") = 0.0)
      .def_property_readonly("save_id", [](const Checkpoint& c) { return base::to_hex(c.head().save_id); })
      .def_property_readonly("checkpoint_id", [](const Checkpoint& c) { return c.head().checkpoint_id; })
      .def_property_readonly("user_metadata", [](const Checkpoint& c) { return c.head().user_metadata; })
      .def_property_readonly("planner_data", [](const Checkpoint& c) { return tree_to_python(c.whole().planner_data); })
      .def_property_readonly("foreign", &foreign_of)
      .def("names", &names_of)
      .def("has", &has, py::arg("fqn"))
      .def_property_readonly("is_whole", [](const Checkpoint& c) { return c.parts() == nullptr; })
      .def("has_others_than", &has_others_than, py::arg("names"))
      .def("files", &files_of)
      .def("contents", &contents_of)
      .def("chunks", &chunks_of)
      .def("tensors_with_gaps", &tensors_with_gaps)
      .def("metadata_file", [](const Checkpoint& c) { return py::bytes(format::encode_metadata_file(c.whole())); });
}

}  // namespace bytecheckpoint::bindings
