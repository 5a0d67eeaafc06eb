// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind.h"

#include <pybind11/stl.h>

#include <algorithm>

#include "csrc/base/order_by_name.h"
#include "csrc/bridge/checkpoint.h"
#include "csrc/bridge/errors.h"
#include "csrc/bridge/tree_caster.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/engine/coverage.h"
#include "csrc/engine/load/describe_view.h"
#include "csrc/engine/open/check_files.h"
#include "csrc/engine/open/planned_files.h"
#include "csrc/engine/open/source_file.h"
#include "csrc/format/data_file.h"
#include "csrc/format/manifest/disk_usage.h"
#include "csrc/format/manifest/metadata_file.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

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

/// Returns for each item (fqn, dtype or None if it is no tensor, sizes, bytes of an element or 0 if its dtype is
/// opaque, bytes of its records (of a dequantized tensor: of all values that these hold), number of its chunks, whether
/// it is partial on purpose).
py::list contents_of(const Checkpoint& checkpoint) {
  py::list out;
  for (const format::Item& item : checkpoint.whole().items) {
    int64_t record_bytes = 0;
    for (size_t c = 0; c < item.chunks.size(); ++c) {
      record_bytes += item.chunks[c].record.bytes * engine::bytes_made_of_one(checkpoint.chunk_of(item, c));
    }
    const tensor::DTypeInfo* dtype = item.is_tensor ? tensor::find_dtype(item.tensor.dtype) : nullptr;
    out.append(py::make_tuple(to_text(item.fqn), dtype == nullptr ? py::object(py::none()) : py::str(dtype->name),
                              ints_of(item.tensor.sizes), dtype == nullptr ? 0 : dtype->itemsize_bytes, record_bytes,
                              item.chunks.size(), item.is_partial));
  }
  return out;
}

/// Returns the names of tensors of which some elements are in no chunk.
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

/// Returns for each item a list of its chunks: (offsets, sizes, file or None if it has no place, offset of the record,
/// its bytes).
py::list chunks_of(const Checkpoint& checkpoint) {
  const format::Manifest& manifest = checkpoint.whole();
  std::vector<py::str> names;
  for (const format::FileEntry& file : manifest.files) names.push_back(to_text(file.name));
  py::list out;
  for (const format::Item& item : manifest.items) {
    py::list chunks;
    for (const format::Chunk& chunk : item.chunks) {
      const bool is_absent =
          chunk.record.kind == format::RecordKind::kAbsent || chunk.record.kind == format::RecordKind::kRefused;
      chunks.append(py::make_tuple(ints_of(chunk.box.offsets), ints_of(chunk.box.sizes),
                                   is_absent ? py::object(py::none()) : names[chunk.record.file], chunk.record.offset,
                                   chunk.record.bytes));
    }
    out.append(std::move(chunks));
  }
  return out;
}

/// Returns ([(first names of a key, dtype or None, number of items, bytes)], bytes of headers and trailers, of block
/// tables, around elements, between records); see `format::disk_usage`.
py::tuple disk_usage_of(const Checkpoint& checkpoint, size_t depth) {
  const format::Manifest& manifest = checkpoint.whole();
  const format::DiskUsage found = unlocked([&] { return format::disk_usage(manifest, depth); });
  py::list rows;
  for (const format::UsageRow& row : found.rows) {
    const tensor::DTypeInfo* dtype = tensor::find_dtype(row.dtype);
    rows.append(py::make_tuple(to_text(row.key), dtype == nullptr ? py::object(py::none()) : py::str(dtype->name),
                               row.num_items, row.bytes));
  }
  return py::make_tuple(rows, found.header_bytes, found.table_bytes, found.archive_bytes, found.padding_bytes);
}

/// Returns for each chunk of an item, in the order of `chunks_of`, where its elements are in the file, or all of an
/// object: (offset, bytes); None if only reading the record shows that.
py::list elements_of(const Checkpoint& checkpoint, const std::string& fqn) {
  py::list out;
  const format::Item* item = checkpoint.whole().find(fqn);
  if (item == nullptr) return out;
  for (const format::Chunk& chunk : item->chunks) {
    const format::Record& record = chunk.record;
    const bool is_known = record.kind == format::RecordKind::kTensor;
    out.append(is_known ? py::object(py::make_tuple(record.data_offset, record.data_bytes)) : py::object(py::none()));
  }
  return out;
}

/// Returns (bytes of a block, where the last block ends, CRCs of all blocks) of a data file; None if it has none.
/// Compares the trailer of the file with the manifest, and its block table with the trailer.
py::object block_checksums(const Checkpoint& checkpoint, const std::string& directory, const std::string& name) {
  const format::Manifest& manifest = checkpoint.head();
  const auto entry = std::find_if(manifest.files.begin(), manifest.files.end(),
                                  [&](const format::FileEntry& file) { return file.name == name; });
  if (entry == manifest.files.end()) throw py::key_error(name);
  const auto source = value_unlocked([&] { return engine::SourceFile::open(directory, manifest, *entry); });
  if (!source->has_checksums) return py::none();
  return py::make_tuple(format::kBlockBytes, source->end_of_records, source->block_crcs);
}

/// Returns (attributes of StorageMeta or None, whether its checkpoint_id is a path, version or None) for the checkpoint
/// of another writer; None for ours.
py::object foreign_of(const Checkpoint& checkpoint) {
  const auto& foreign = checkpoint.head().foreign;
  if (!foreign.has_value()) return py::none();
  return py::make_tuple(tree_to_python(foreign->storage_meta), foreign->checkpoint_id_is_path,
                        tree_to_python(foreign->version));
}

/// Bytes of the elements of a tensor that are stored; of an object, or a tensor that is not plain, of its records.
int64_t bytes_of(const format::Item& item) {
  const tensor::DTypeInfo* plain = item.is_tensor ? tensor::find_plain_dtype(item.tensor.dtype) : nullptr;
  int64_t bytes = 0;
  for (const format::Chunk& chunk : item.chunks) {
    int64_t numel = 0;
    const bool is_counted = plain != nullptr && tensor::checked_numel(chunk.box.sizes, &numel);
    bytes += is_counted ? numel * plain->itemsize_bytes : chunk.record.bytes;
  }
  return bytes;
}

/// Returns the bytes of what is stored beside some items; None if not all of the metadata have been read.
/// \param marks  A byte for each item, 1 if it is one of them. None: they are all items.
std::optional<int64_t> bytes_beside(const Checkpoint& checkpoint, const std::optional<py::bytes>& marks) {
  if (checkpoint.parts() != nullptr) return std::nullopt;
  const format::Manifest& manifest = checkpoint.whole();
  const std::string_view marked = marks.has_value() ? std::string_view(*marks) : std::string_view();
  if (marks.has_value() && marked.size() != manifest.items.size()) throw py::value_error("a mark for each item");
  int64_t bytes = 0;
  const format::Manifest& stored = checkpoint.view() == nullptr ? manifest : *checkpoint.view()->stored;
  for (const format::Item& item : stored.items) bytes += bytes_of(item);
  for (size_t i = 0; i < manifest.items.size(); ++i) {
    if (!marks.has_value() || marked[i] != 0) bytes -= bytes_of(manifest.items[i]);
  }
  return std::max<int64_t>(bytes, 0);
}

bool has(const Checkpoint& checkpoint, const std::string& fqn) {
  engine::ManifestReader* parts = checkpoint.parts();
  if (parts == nullptr) return checkpoint.whole().find(fqn) != nullptr;
  return value_or_raise(parts->find_item(fqn)).has_value();
}

/// Returns the names of all items, in an order that is the same on all ranks that read this checkpoint.
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
  if (engine::ManifestReader* parts = checkpoint.parts(); parts != nullptr) {
    if (parts->view().num_items() > names.size()) return true;  // some are missing, so none has to be looked up
    std::vector<std::string> asked;
    asked.reserve(names.size());
    for (const auto& [name, value] : names) asked.push_back(py::str(name).cast<std::string>());
    return value_unlocked([&]() -> base::Result<bool> {
      BCP_ASSIGN_OR_RETURN(const std::vector<std::string> stored, parts->read_names());
      const auto name_of = [&](uint32_t n) -> std::string_view { return asked[n]; };
      // Both ascend. Names of a damaged manifest that do not count as others.
      size_t found = 0;
      for (const uint32_t n : base::order_by_name(asked.size(), name_of)) {
        if (found < stored.size() && stored[found] == asked[n]) ++found;
      }
      return found < stored.size();
    });
  }
  const std::vector<format::Item>& items = checkpoint.whole().items;
  return std::any_of(items.begin(), items.end(),
                     [&](const format::Item& item) { return !names.contains(to_text(item.fqn)); });
}

std::string format_of(const Checkpoint& checkpoint) {
  const auto& foreign = checkpoint.head().foreign;
  return foreign.has_value() ? foreign->format : "bytecheckpoint";
}

py::str file_versions_of(const Checkpoint& checkpoint) {
  return checkpoint.head().foreign.has_value() ? to_text(engine::versions_of(checkpoint.head())) : py::str();
}

/// Raises an error if a file of a foreign checkpoint was replaced since it was opened.
void check_unchanged(const Checkpoint& checkpoint, const std::string& directory) {
  if (!checkpoint.head().foreign.has_value()) return;
  run_unlocked([&] { return engine::check_all_unchanged(directory, checkpoint.head()); });
}

/// Gives `sink` the bytes that tell this view from others; none unless the checkpoint is a view.
/// Reads a commit mark of ours that another machine has.
CheckpointHolder of_metadata_file(const std::string& bytes) {
  return CheckpointHolder(new Checkpoint(value_unlocked([&] { return format::decode_metadata_file(bytes); })));
}

void describe(const Checkpoint& checkpoint, const py::function& sink) {
  if (checkpoint.view() == nullptr) return;
  engine::describe_view(*checkpoint.view(), [&](std::string_view bytes) { sink(py::bytes(bytes)); });
}

}  // namespace

void bind_checkpoint(py::module_& m) {
  m.def("take_refusal_of_direct", &io::take_refusal_of_direct);
  py::class_<Checkpoint, CheckpointHolder>(m, "Checkpoint", py::module_local())
      .def_static("open", &open, py::arg("directory"), py::kw_only(), py::arg("rank") = py::none(),
                  py::arg("check_pickle") = false, py::arg("accept_rewritten") = false,
                  py::arg("max_whole_bytes") = INT64_MAX, py::arg("io_timeout_s") = 0.0)
      .def_static("of_metadata_file", &of_metadata_file, py::arg("content"))
      .def_property_readonly("save_id", [](const Checkpoint& c) { return base::to_hex(c.head().save_id); })
      .def_property_readonly("checkpoint_id", [](const Checkpoint& c) { return c.head().checkpoint_id; })
      .def_property_readonly("user_metadata", [](const Checkpoint& c) { return c.head().user_metadata; })
      .def_property_readonly("planner_data", [](const Checkpoint& c) { return tree_to_python(c.whole().planner_data); })
      .def_property_readonly("foreign", &foreign_of)
      .def_property_readonly("format", &format_of)
      .def_property_readonly("note",
                             [](const Checkpoint& checkpoint) {
                               const auto& foreign = checkpoint.head().foreign;
                               return to_text(foreign.has_value() ? foreign->note : std::string());
                             })
      .def_property_readonly(
          "is_of_byte_checkpoint",
          [](const Checkpoint& c) { return c.head().foreign.has_value() && c.head().foreign->is_of_byte_checkpoint; })
      .def("names", &names_of)
      .def_property_readonly("num_items",
                             [](const Checkpoint& c) {
                               return c.parts() != nullptr ? c.parts()->view().num_items() : c.whole().items.size();
                             })
      .def_property_readonly("is_view", [](const Checkpoint& c) { return c.view() != nullptr; })
      .def("bytes_beside", &bytes_beside, py::arg("marks"))
      .def("has", &has, py::arg("fqn"))
      .def_property_readonly("is_whole", [](const Checkpoint& c) { return c.parts() == nullptr; })
      .def("has_others_than", &has_others_than, py::arg("names"))
      .def("files", &files_of)
      .def("contents", &contents_of)
      .def("chunks", &chunks_of)
      .def("disk_usage", &disk_usage_of, py::arg("depth"))
      .def("elements", &elements_of, py::arg("fqn"))
      .def("block_checksums", &block_checksums, py::arg("directory"), py::arg("name"))
      .def("tensors_with_gaps", &tensors_with_gaps)
      .def(
          "data_directory",
          [](const Checkpoint& c, const std::string& opened) { return c.head().data_directory(opened); },
          py::arg("opened"))
      .def("file_versions", &file_versions_of)
      .def("check_unchanged", &check_unchanged, py::arg("directory"))
      .def("describe", &describe, py::arg("sink"))
      .def("is_view_of", &Checkpoint::is_view_of, py::arg("stored"))
      .def("plain_metadata_file",
           [](const Checkpoint& c) { return py::bytes(format::metadata_pickle(c.whole(), 0, "")); })
      .def("metadata_file",
           [](const Checkpoint& c) {
             const format::Manifest& manifest = c.whole();
             return py::bytes(unlocked([&] { return format::encode_metadata_file(manifest); }));
           })
      .def(
          "check_files",
          [](const Checkpoint& c, const std::string& directory) {
            run_unlocked([&] { return engine::check_files(directory, c.head().files); });
          },
          py::arg("directory"));
}

}  // namespace bytecheckpoint::bindings
