// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include "csrc/bindings/bind_checkpoint.h"
#include "csrc/bindings/bind_engine.h"
#include "csrc/bindings/dcp_objects.h"
#include "csrc/bindings/torch_tensor.h"
#include "csrc/bindings/unlocked.h"
#include "csrc/engine/load_job.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using base::text;

/// The items of a LoadPlan, their fields read once, and the stored chunks that they want. Raises KeyMismatchError,
/// ShapeMismatchError or InvalidPlanError for what the checkpoint does not have.
struct ReadPlan {
  struct Read {
    PlannedRead planned;
    const format::Chunk* chunk;
  };

  ReadPlan(const Checkpoint& checkpoint, const py::iterable& plan_items) {
    for (const py::handle item : plan_items) {
      PlannedRead planned = read_read_item(item);
      const format::Chunk& chunk = checkpoint.find_chunk(planned.fqn, planned.chunk_offsets, planned.hint);
      check(planned, chunk);
      (planned.is_tensor ? tensors : objects).append(item);
      // Records may share bytes, and a foreign one may claim any number of them.
      if (!base::checked_add(num_bytes, chunk.record.bytes, &num_bytes)) num_bytes = INT64_MAX;
      (planned.is_tensor ? tensor_reads : object_reads).push_back({std::move(planned), &chunk});
    }
  }

  static void check(const PlannedRead& planned, const format::Chunk& chunk) {
    if (chunk.record.kind == format::RecordKind::kAbsent) return;  // told when its file is looked for
    const bool stored_bytes = chunk.record.kind == format::RecordKind::kBytes;
    if (planned.is_tensor == stored_bytes) {
      raise(base::Status::make(base::Code::kInvalidArgument,
                               text("'", planned.fqn, "': ", planned.is_tensor ? "a tensor" : "bytes",
                                    " wanted, stored is ", stored_bytes ? "bytes" : "a tensor")));
    }
    if (planned.is_tensor && !tensor::is_inside(planned.box, chunk.box.sizes)) {
      raise_as("ShapeMismatchError", text("'", planned.fqn, "': wanted ", tensor::to_text(planned.box.sizes), " at ",
                                          tensor::to_text(planned.box.offsets), " of a stored chunk, got a chunk of ",
                                          tensor::to_text(chunk.box.sizes)));
    }
  }

  py::list tensors, objects;  // the items themselves
  std::vector<Read> tensor_reads, object_reads;
  int64_t num_bytes = 0;  // of the records that hold what is wanted
};

/// A LoadJob, the plan that it carries out, and where each tensor of the plan is stored.
struct PyLoadJob {
  const ReadPlan& plan;
  engine::LoadJob job;
  std::vector<std::optional<engine::TensorPlace>> places;

  const ReadPlan::Read& tensor_at(size_t position) const {
    if (position >= plan.tensor_reads.size()) throw py::index_error("no such tensor in the plan");
    return plan.tensor_reads[position];
  }
  const ReadPlan::Read& object_at(size_t position) const {
    if (position >= plan.object_reads.size()) throw py::index_error("no such object in the plan");
    return plan.object_reads[position];
  }
};

std::unique_ptr<PyLoadJob> start_load(const Checkpoint& checkpoint, const ReadPlan& plan, std::string directory,
                                      engine::Scope rank, bool direct_io, bool verify, int num_io_threads,
                                      int64_t ring_bytes) {
  std::vector<const format::Chunk*> chunks;
  for (const ReadPlan::Read& read : plan.tensor_reads) chunks.push_back(read.chunk);
  std::vector<const format::Chunk*> all = chunks;
  for (const ReadPlan::Read& read : plan.object_reads) all.push_back(read.chunk);
  engine::LoadOptions options{std::move(directory), rank, direct_io, verify, num_io_threads, ring_bytes};
  const format::Manifest& manifest = checkpoint.manifest;
  engine::LoadJob job(options, manifest);
  auto places = value_unlocked([&]() -> base::Result<std::vector<std::optional<engine::TensorPlace>>> {
    // A file that is gone or short may be a newer commit's doing.
    base::Status extents = engine::check_extents(options.directory, manifest, all);
    if (!extents.is_ok()) return job.explain(std::move(extents));
    auto located = engine::locate_tensors(options.directory, manifest, chunks);
    if (!located.is_ok()) return job.explain(located.status());
    return located;
  });
  return std::unique_ptr<PyLoadJob>(new PyLoadJob{plan, std::move(job), std::move(places)});
}

/// Can `view` be filled in place? Not if it has another dtype than what is stored, or elements that share memory.
bool can_fill(const tensor::StridedView& view, tensor::DType stored) {
  if (view.dtype != stored) return false;
  for (size_t d = 0; d < view.sizes.size(); ++d) {
    if (view.sizes[d] > 1 && view.strides_bytes[d] == 0) return false;
  }
  return true;
}

/// Adds destinations of tensors [begin, begin + len(targets)) of the plan; the caller keeps them alive until the run.
/// \returns positions in the plan that cannot be filled directly: other dtype, device or layout, opaque records.
std::vector<size_t> add_tensors(PyLoadJob& self, size_t begin, const py::list& targets) {
  std::vector<size_t> left_out;
  for (size_t i = 0; i < targets.size(); ++i) {
    const auto& [planned, chunk] = self.tensor_at(begin + i);
    const std::optional<tensor::Dims> sizes = sizes_of_tensor(targets[i].ptr());
    if (!sizes.has_value() || *sizes != planned.box.sizes) {
      raise_as("ShapeMismatchError", text("'", planned.fqn, "': wanted ", tensor::to_text(planned.box.sizes), ", got ",
                                          sizes.has_value() ? "a tensor of " + tensor::to_text(*sizes) : "no tensor"));
    }
    const auto& place = self.places[begin + i];
    const auto view = view_of_tensor(targets[i].ptr(), /*writable=*/true);
    if (!place.has_value() || !view.is_ok() || !can_fill(view.value(), place->dtype)) {
      left_out.push_back(begin + i);
      continue;
    }
    raise_if_error(self.job.add_tensor(planned.fqn, *chunk, *place, planned.box, view.value()));
  }
  return left_out;
}

/// Adds the destination of a whole record of bytes.
void add_record(PyLoadJob& self, const ReadPlan::Read& read, const py::buffer& buffer) {
  const py::buffer_info info = buffer.request(/*writable=*/true);
  if (info.size * info.itemsize != read.chunk->record.bytes) {
    throw py::value_error("'" + read.planned.fqn + "': buffer of another size");
  }
  self.job.add_bytes(read.chunk->record, static_cast<uint8_t*>(info.ptr));
}

py::dict run_load(PyLoadJob& self) {
  // Ctrl-C is seen between segments; the error that the handler raised stays set.
  bool interrupted = false;
  const auto cancelled = [&] {
    const py::gil_scoped_acquire locked;
    interrupted = PyErr_CheckSignals() != 0;
    return interrupted;
  };
  auto result = [&] {
    const py::gil_scoped_release unlocked;
    return self.job.run(cancelled);
  }();
  if (interrupted) throw py::error_already_set();
  const engine::LoadStats stats = value_or_raise(std::move(result));
  py::dict out;
  out["num_boxes"] = stats.num_boxes;
  out["num_files"] = stats.num_files;
  out["bytes_wanted"] = stats.bytes_wanted;
  out["bytes_read"] = stats.bytes_read;
  out["seconds"] = stats.seconds;
  return out;
}

}  // namespace

void bind_load(py::module_& m) {
  py::class_<ReadPlan>(m, "ReadPlan", py::module_local())
      .def(py::init<const Checkpoint&, const py::iterable&>(), py::keep_alive<1, 2>(), py::arg("checkpoint"),
           py::arg("items"))
      .def_readonly("tensors", &ReadPlan::tensors)
      .def_readonly("objects", &ReadPlan::objects)
      .def_readonly("num_bytes", &ReadPlan::num_bytes);
  py::class_<PyLoadJob>(m, "LoadJob", py::module_local())
      .def(py::init(&start_load), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::arg("checkpoint"),
           py::arg("plan"), py::kw_only(), py::arg("directory"), py::arg("rank"), py::arg("direct_io"),
           py::arg("verify"), py::arg("num_io_threads"), py::arg("ring_bytes"))
      .def("add_tensors", &add_tensors, py::arg("begin"), py::arg("targets"))
      .def(
          "stored_dtype",
          [](const PyLoadJob& self, size_t position) -> std::string {
            (void)self.tensor_at(position);
            const auto& place = self.places[position];
            return place.has_value() ? tensor::find_dtype(place->dtype)->name : "";
          },
          py::arg("position"))
      .def(
          "archive_bytes",
          [](const PyLoadJob& self, size_t position) { return self.tensor_at(position).chunk->record.bytes; },
          py::arg("position"))
      .def(
          "add_archive",
          [](PyLoadJob& self, size_t position, const py::buffer& buffer) {
            add_record(self, self.tensor_at(position), buffer);
          },
          py::arg("position"), py::arg("buffer"))
      .def(
          "object_bytes",
          [](const PyLoadJob& self, size_t position) { return self.object_at(position).chunk->record.bytes; },
          py::arg("position"))
      .def(
          "add_object",
          [](PyLoadJob& self, size_t position, const py::buffer& buffer) {
            add_record(self, self.object_at(position), buffer);
          },
          py::arg("position"), py::arg("buffer"))
      .def("run", &run_load);
}

}  // namespace bytecheckpoint::bindings
