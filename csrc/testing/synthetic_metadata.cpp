// SPDX-License-Identifier: Apache-2.0
#include "csrc/testing/bindings.h"

#include <malloc.h>
#include <pybind11/stl.h>

#include <optional>

#include "csrc/bridge/dims_caster.h"
#include "csrc/bridge/gil.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/engine/commit/assemble.h"
#include "csrc/engine/open/manifest_reader.h"
#include "csrc/format/manifest/metadata_file.h"
#include "csrc/format/torch/zip_record.h"
#include "csrc/io/file.h"
#include "csrc/testing/synthetic_checkpoint.h"

namespace bytecheckpoint::testing {
namespace {

namespace py = pybind11;
using namespace bridge;

using base::Code;
using base::Status;
using base::text;

/// A synthetic checkpoint, from plan to file. Each step is one call, so that a benchmark can time it.
class SyntheticMetadata {
 public:
  SyntheticMetadata(const std::string& kind, int64_t num_ranks, int64_t chunks_per_rank)
      : made_(value_unlocked([&] { return make_synthetic_checkpoint(kind, num_ranks, chunks_per_rank); })) {}

  ~SyntheticMetadata() {
    manifest_.reset();
    forget_results();  // the next measurement must not profit from memory that is there
  }

  /// Computes the offsets of all records, as a save lays them out. \returns the bytes of all files.
  int64_t lay_out() const {
    return value_unlocked([&]() -> base::Result<int64_t> {
      int64_t bytes = 0;
      for (const format::WriteResult& result : made_.value().results) {
        int64_t position = format::kHeaderBytes;
        for (const format::WrittenRecord& written : result.records) {
          position = base::align_up(position, format::kRecordAlignment);
          BCP_ASSIGN_OR_RETURN(const format::RecordExtent extent,
                               format::ZipRecord::measure(written.record.stored_dtype, written.box.sizes, position));
          position += extent.record_bytes;
        }
        bytes += position;
      }
      return bytes;
    });
  }

  /// Makes the manifest. May be called once, since it consumes the plan.
  void assemble() {
    manifest_ =
        value_unlocked([&] { return engine::assemble_manifest(std::move(made_.value().plan), made_.value().results); });
  }

  /// Frees the plan and the results: a coordinator no longer needs them when it encodes.
  void forget_results() {
    made_.reset();
    malloc_trim(0);
  }

  /// Encodes the metadata file and keeps it. \returns its size in bytes.
  size_t encode() {
    const WithoutGil unlocked;
    std::string().swap(file_);  // a save never has two of them at a time
    file_ = format::encode_metadata_file(manifest_.value());
    return file_.size();
  }

  /// Writes the file. Its bytes are too many to be returned to Python.
  void write_to(const std::string& path) const {
    run_unlocked([&]() -> Status {
      BCP_ASSIGN_OR_RETURN(io::File file, io::File::create(path, /*direct=*/false));
      return file.write_at(file_.data(), static_cast<int64_t>(file_.size()), 0);
    });
  }

  /// Returns [(FQN, offsets, sizes), ...] of what a rank wrote.
  py::list boxes_of(size_t rank) const {
    py::list boxes;
    for (const format::WrittenRecord& written : made_.value().results.at(rank).records) {
      boxes.append(py::make_tuple(written.fqn, written.box.offsets, written.box.sizes));
    }
    return boxes;
  }

 private:
  std::optional<SyntheticCheckpoint> made_;
  std::optional<format::Manifest> manifest_;
  std::string file_;
};

using NamedBox = std::tuple<std::string, tensor::Dims, tensor::Dims>;

/// Finds the chunks of `boxes`. \returns (chunks, blocks that were read, blocks in all).
py::tuple find_chunks(const std::string& directory, const std::vector<NamedBox>& boxes) {
  int64_t num_chunks = 0;
  const auto reader = value_unlocked([&]() -> base::Result<engine::ManifestReader> {
    BCP_ASSIGN_OR_RETURN(engine::ManifestReader reader, engine::ManifestReader::open(directory));
    for (const auto& [fqn, offsets, sizes] : boxes) {
      BCP_ASSIGN_OR_RETURN(const auto found, reader.find_item(fqn));
      if (!found.has_value()) return Status::make(Code::kInvalidArgument, text("'", fqn, "': not in the checkpoint"));
      BCP_ASSIGN_OR_RETURN(const auto chunks, reader.read_overlapping(*found, {offsets, sizes}));
      for (const format::Chunk& chunk : chunks) {
        BCP_RETURN_IF_ERROR(reader.read_file(chunk.record.file).status());
        ++num_chunks;
      }
    }
    return reader;
  });
  return py::make_tuple(num_chunks, reader.view().num_blocks_read(), reader.view().num_blocks());
}

}  // namespace

void bind_synthetic_metadata(py::module_& m) {
  py::class_<SyntheticMetadata>(m, "SyntheticMetadata")
      .def(py::init<const std::string&, int64_t, int64_t>(), py::arg("kind"), py::arg("num_ranks"),
           py::arg("chunks_per_rank"))
      .def("boxes_of", &SyntheticMetadata::boxes_of, py::arg("rank"))
      .def("lay_out", &SyntheticMetadata::lay_out)
      .def("assemble", &SyntheticMetadata::assemble)
      .def("forget_results", &SyntheticMetadata::forget_results)
      .def("encode", &SyntheticMetadata::encode)
      .def("write_to", &SyntheticMetadata::write_to, py::arg("path"));
  m.def("find_chunks", &find_chunks, py::arg("directory"), py::arg("boxes"));
}

}  // namespace bytecheckpoint::testing
