// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind_engine.h"

#include <pybind11/stl.h>
#include <unistd.h>

#include "csrc/bindings/bind_checkpoint.h"
#include "csrc/bindings/errors.h"
#include "csrc/bindings/torch_tensor.h"
#include "csrc/engine/commit.h"
#include "csrc/engine/load_job.h"
#include "csrc/engine/random_id.h"
#include "csrc/engine/save_job.h"
#include "csrc/format/metadata_file.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using base::Status;
using tensor::Dims;

/// Runs `work` without the GIL and raises its Status.
template <class Work>
void run_unlocked(Work&& work) {
  Status outcome;
  {
    const py::gil_scoped_release unlocked;
    outcome = work();
  }
  raise_if_error(outcome);
}

template <class Work>
auto value_unlocked(Work&& work) {
  auto result = [&] {
    const py::gil_scoped_release unlocked;
    return work();
  }();
  return value_or_raise(std::move(result));
}

/// A forked child has none of a job's threads, and would wait for them for ever in its destructor: there it is leaked.
struct LeakInForkedChild {
  pid_t owner = ::getpid();
  void operator()(engine::SaveJob* job) const {
    if (::getpid() == owner) delete job;
  }
};
using SaveJobHolder = std::unique_ptr<engine::SaveJob, LeakInForkedChild>;

SaveJobHolder start_save(std::string directory, uint32_t rank, bool direct_io, bool sync, bool one_file_a_record,
                         int num_io_threads, int64_t ring_bytes, int64_t expected_bytes) {
  engine::SaveOptions options{std::move(directory), rank,           direct_io,  sync,
                              one_file_a_record,    num_io_threads, ring_bytes, expected_bytes};
  return SaveJobHolder(value_unlocked([&] { return engine::SaveJob::start(std::move(options)); }).release());
}

/// [(fqn, chunk offsets, chunk sizes, tensor), ...]; the list keeps the tensors alive meanwhile.
void append_tensors(engine::SaveJob& job, const py::list& records) {
  struct Planned {
    std::string fqn;
    tensor::Box box;
    tensor::StridedView view;
  };
  std::vector<Planned> planned;
  planned.reserve(records.size());
  for (const py::handle record : records) {
    auto [fqn, offsets, sizes, object] = record.cast<std::tuple<std::string, Dims, Dims, py::object>>();
    base::Result<tensor::StridedView> view = view_of_tensor(object.ptr(), /*writable=*/false);
    if (!view.is_ok()) raise(view.status().with_context("while saving '" + fqn + "'"));
    if (view.value().sizes != sizes) {
      raise(Status::make(base::Code::kInvalidArgument,
                         base::text("while saving '", fqn, "': planned shape ", tensor::to_text(sizes),
                                    ", the planner resolved it to ", tensor::to_text(view.value().sizes))));
    }
    planned.push_back({std::move(fqn), {std::move(offsets), std::move(sizes)}, std::move(view.value())});
  }
  run_unlocked([&] {
    for (const Planned& p : planned) {
      Status outcome = job.append_tensor(p.fqn, p.box, p.view);
      if (!outcome.is_ok()) return std::move(outcome).with_context("while saving '" + p.fqn + "'");
    }
    return Status::ok();
  });
}

void append_bytes(engine::SaveJob& job, const std::string& fqn, const py::buffer& data) {
  const py::buffer_info info = data.request();
  const std::string_view bytes(static_cast<const char*>(info.ptr), static_cast<size_t>(info.size * info.itemsize));
  run_unlocked([&] { return job.append_bytes(fqn, bytes).with_context("while saving '" + fqn + "'"); });
}

py::dict save_stats(const engine::SaveJob& job) {
  const engine::SaveStats& stats = job.stats();
  py::dict out;
  out["num_records"] = stats.num_records;
  out["bytes_written"] = stats.bytes_written;
  out["stage_s"] = stats.stage_s;
  out["flush_s"] = stats.flush_s;
  out["sync_s"] = stats.sync_s;
  return out;
}

void bind_save_job(py::module_& m) {
  py::class_<engine::SaveJob, SaveJobHolder>(m, "SaveJob", py::module_local())
      .def(py::init(&start_save), py::kw_only(), py::arg("directory"), py::arg("rank"), py::arg("direct_io"),
           py::arg("sync"), py::arg("one_file_a_record"), py::arg("num_io_threads"), py::arg("ring_bytes"),
           py::arg("expected_bytes"))
      .def("append_tensors", &append_tensors, py::arg("records"))
      .def("append_bytes", &append_bytes, py::arg("fqn"), py::arg("data"))
      .def("finish",
           [](engine::SaveJob& job) {
             const format::WriteResult result = value_unlocked([&] { return job.finish(); });
             return py::bytes(format::encode_write_result(result));
           })
      .def_property_readonly("file_names", &engine::SaveJob::file_names)
      .def("stats", &save_stats);
}

/// A LoadJob and the checkpoint it reads from.
struct PyLoadJob {
  PyLoadJob(const Checkpoint& checkpoint, engine::LoadOptions options)
      : checkpoint(checkpoint), job(std::move(options), checkpoint.manifest) {}

  const Checkpoint& checkpoint;
  engine::LoadJob job;
};

std::unique_ptr<PyLoadJob> start_load(const Checkpoint& checkpoint, std::string directory, bool direct_io, bool verify,
                                      int num_io_threads, int64_t ring_bytes) {
  return std::make_unique<PyLoadJob>(
      checkpoint, engine::LoadOptions{std::move(directory), direct_io, verify, num_io_threads, ring_bytes});
}

/// \returns false if `object` cannot be filled directly: other dtype, device, layout, or elements that share memory.
bool add_tensor(PyLoadJob& self, const std::string& fqn, const Dims& chunk_offsets, int64_t hint,
                const Dims& box_offsets, const Dims& box_sizes, const py::object& object) {
  const format::Chunk& chunk = self.checkpoint.find_chunk(fqn, chunk_offsets, hint);
  base::Result<tensor::StridedView> view = view_of_tensor(object.ptr(), /*writable=*/true);
  if (!view.is_ok() || view.value().dtype != chunk.record.stored_dtype) return false;
  for (size_t d = 0; d < view.value().sizes.size(); ++d) {
    if (view.value().sizes[d] > 1 && view.value().strides_bytes[d] == 0) return false;
  }
  raise_if_error(self.job.add_tensor(fqn, chunk, {box_offsets, box_sizes}, view.value()));
  return true;
}

void add_bytes(PyLoadJob& self, const std::string& fqn, const py::buffer& buffer) {
  const format::Chunk& chunk = self.checkpoint.find_chunk(fqn, {}, 0);
  const py::buffer_info info = buffer.request(/*writable=*/true);
  if (info.size * info.itemsize != chunk.record.bytes) throw py::value_error("'" + fqn + "': buffer of another size");
  raise_if_error(self.job.add_bytes(chunk.record, static_cast<uint8_t*>(info.ptr)));
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

void bind_load_job(py::module_& m) {
  py::class_<PyLoadJob>(m, "LoadJob", py::module_local())
      .def(py::init(&start_load), py::keep_alive<1, 2>(), py::arg("checkpoint"), py::kw_only(), py::arg("directory"),
           py::arg("direct_io"), py::arg("verify"), py::arg("num_io_threads"), py::arg("ring_bytes"))
      .def("add_tensor", &add_tensor, py::arg("fqn"), py::arg("chunk_offsets"), py::arg("hint"), py::arg("box_offsets"),
           py::arg("box_sizes"), py::arg("tensor"))
      .def("add_bytes", &add_bytes, py::arg("fqn"), py::arg("buffer"))
      .def("run", &run_load);
}

std::unique_ptr<engine::Commit> begin_commit(std::string directory, const std::string& save_id, bool overwrite,
                                             bool take_over, bool sync, int64_t reserve_bytes, double deadline_s) {
  engine::CommitOptions options;
  options.directory = std::move(directory);
  if (!base::id_from_hex(save_id, &options.save_id)) throw py::value_error("save id: 32 hex digits wanted");
  options.overwrite = overwrite;
  options.take_over = take_over;
  options.sync = sync;
  options.reserve_bytes = reserve_bytes;
  options.deadline_s = deadline_s;
  return value_unlocked([&] { return engine::Commit::begin(std::move(options)); });
}

py::dict commit(engine::Commit& self, const Checkpoint& checkpoint) {
  const engine::CommitReport report = value_unlocked(
      [&] { return self.commit(format::encode_metadata_file(checkpoint.manifest), checkpoint.manifest.files); });
  py::dict out;
  out["directory_synced"] = report.directory_synced;
  out["files_swept"] = report.files_swept;
  out["warnings"] = report.warnings;
  return out;
}

void bind_commit(py::module_& m) {
  py::class_<engine::Commit>(m, "Commit", py::module_local())
      .def(py::init(&begin_commit), py::kw_only(), py::arg("directory"), py::arg("save_id"), py::arg("overwrite"),
           py::arg("take_over"), py::arg("sync"), py::arg("reserve_bytes"), py::arg("deadline_s"))
      .def(
          "check_files",
          [](engine::Commit& self, const Checkpoint& checkpoint) {
            run_unlocked([&] { return self.check_files(checkpoint.manifest.files); });
          },
          py::arg("checkpoint"))
      .def("commit", &commit, py::arg("checkpoint"))
      .def(
          "abort",
          [](engine::Commit& self, const std::vector<std::string>& file_names) {
            run_unlocked([&] { return self.abort(file_names); });
          },
          py::arg("file_names"))
      .def("abandon", &engine::Commit::abandon, py::call_guard<py::gil_scoped_release>())
      .def("is_over", &engine::Commit::is_over, py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_engine(py::module_& m) {
  bind_save_job(m);
  bind_load_job(m);
  bind_commit(m);
  m.def("draw_save_id", [] { return base::to_hex(value_or_raise(engine::draw_id())); });
}

}  // namespace bytecheckpoint::bindings
