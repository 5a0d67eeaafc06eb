// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>
#include <unistd.h>

#include <thread>

#include "csrc/base/named_thread.h"
#include "csrc/base/niceness.h"
#include "csrc/bindings/bind_engine.h"
#include "csrc/bindings/breath.h"
#include "csrc/bindings/gil.h"
#include "csrc/bindings/torch_tensor.h"
#include "csrc/bindings/unlocked.h"
#include "csrc/bindings/write_plan.h"
#include "csrc/engine/save_job.h"
#include "csrc/io/patience.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using base::Status;
using base::text;

/// A forked child has none of a job's threads, and would wait for them for ever in its destructor: there it is leaked.
/// Its parent waits no longer than it must for storage that does not answer.
struct EndSaveJob {
  pid_t owner = ::getpid();
  bool is_bounded = true;
  void operator()(engine::SaveJob* job) const {
    if (::getpid() != owner) return;
    const WithoutGil no_gil;
    io::DeletePatiently{is_bounded}(job);
  }
};
using SaveJobHolder = std::unique_ptr<engine::SaveJob, EndSaveJob>;

SaveJobHolder start_save(std::string directory, uint32_t rank, bool direct_io, bool sync, bool one_file_a_record,
                         int num_io_threads, int64_t ring_bytes, int64_t expected_bytes, int niceness,
                         int64_t bytes_per_s, double io_timeout_s) {
  engine::SaveOptions options{std::move(directory), rank,       direct_io,      sync,     one_file_a_record,
                              num_io_threads,       ring_bytes, expected_bytes, niceness, bytes_per_s,
                              io_timeout_s};
  return SaveJobHolder(value_unlocked([&] { return engine::SaveJob::start(std::move(options)); }).release(),
                       EndSaveJob{::getpid(), io_timeout_s > 0});
}

/// The memory of one tensor that is to be written.
struct Ready {
  const PlannedWrite* planned;
  tensor::StridedView view;
};

Status append_all(engine::SaveJob& job, const std::vector<Ready>& ready) {
  for (const Ready& r : ready) {
    Status outcome = job.append_tensor(r.planned->fqn, r.planned->box, r.view);
    if (!outcome.is_ok()) return std::move(outcome).with_context("while saving '" + r.planned->fqn + "'");
  }
  return Status::ok();
}

void append_ready(engine::SaveJob& job, const std::vector<Ready>& ready) {
  run_unlocked([&] {
    if (job.niceness() == 0) return append_all(job, ready);
    // In a thread of its own: the calling one runs Python, and others would wait for the GIL while it waits for a core.
    Status outcome;
    base::named_thread("bcp-append", [&] {
      base::add_niceness(job.niceness());
      outcome = append_all(job, ready);
    }).join();
    return outcome;
  });
}

Status check_shape(const std::string& fqn, const tensor::Dims& planned, const tensor::Dims& got) {
  if (got == planned) return Status::ok();
  return Status::make(base::Code::kInvalidArgument,
                      text("while saving '", fqn, "': planned shape ", tensor::to_text(planned),
                           ", the planner resolved it to ", tensor::to_text(got)));
}

/// From the whole of a box that is held to the part of it that is written.
Status narrow(const LocalState& state, const Write& write, tensor::StridedView* view) {
  const tensor::Box held = state.inventory().box(state.inventory().entries[write.entry], write.box);
  BCP_RETURN_IF_ERROR(check_shape(write.planned.fqn, held.sizes, view->sizes));
  tensor::Dims begin = write.planned.box.offsets;
  for (size_t d = 0; d < begin.size(); ++d) begin[d] -= held.offsets[d];
  *view = tensor::part_of(std::move(*view), begin, write.planned.box.sizes);
  return Status::ok();
}

/// Writes what the planner resolved tensors [begin, begin + len(values)) to; the list keeps them alive meanwhile.
/// \returns positions in `values` that are not plain host tensors, which are left out.
std::vector<size_t> append_tensors(engine::SaveJob& job, const WritePlan& plan, size_t begin, const py::list& values) {
  std::vector<Ready> ready;
  std::vector<size_t> left_out;
  for (size_t i = 0; i < values.size(); ++i) {
    const PlannedWrite& planned = plan.tensor_at(begin + i).planned;
    base::Result<tensor::StridedView> view = view_of_plain_tensor(values[i].ptr());
    if (!view.is_ok()) {
      left_out.push_back(i);
      continue;
    }
    raise_if_error(check_shape(planned.fqn, planned.box.sizes, view.value().sizes));
    ready.push_back({&planned, std::move(view.value())});
  }
  append_ready(job, ready);
  return left_out;
}

/// Writes all tensors of a plan that was made of a local state.
/// \param state_dict  As the planner has it now: what is no longer the value that was planned is left out.
/// \returns positions in the plan of what is left out, and of what is not in plain host memory.
std::vector<size_t> append_state(engine::SaveJob& job, const WritePlan& plan, const py::dict& state_dict) {
  const LocalState& state = *plan.state();
  std::vector<Ready> ready;
  std::vector<const Write*> writes;  // of what is ready
  std::vector<py::object> alive;
  std::vector<size_t> left_out;
  Breath breath;
  for (size_t i = 0; i < plan.tensors().size(); ++i) {
    breath.take();
    const Write& write = plan.tensors()[i];
    const HeldValue& held = state.held(write.entry);
    if (held.kind != HeldValue::Kind::kOther && is_still(held, state_dict)) {
      const py::object& local = alive.emplace_back(held.local(write.box));
      base::Result<tensor::StridedView> view = view_of_plain_tensor(local.ptr());
      if (view.is_ok() && view.value().dtype == write.planned.dtype->dtype) {
        ready.push_back({&write.planned, std::move(view.value())});
        writes.push_back(&write);
        continue;
      }
    }
    left_out.push_back(i);
  }
  run_unlocked([&] {
    for (size_t i = 0; i < ready.size(); ++i) BCP_RETURN_IF_ERROR(narrow(state, *writes[i], &ready[i].view));
    return Status::ok();
  });
  append_ready(job, ready);
  return left_out;
}

std::string_view contents(const py::buffer_info& info) {
  return {static_cast<const char*>(info.ptr), static_cast<size_t>(info.size * info.itemsize)};
}

void append_opaque(engine::SaveJob& job, const WritePlan& plan, size_t position, const py::buffer& archive) {
  const PlannedWrite& planned = plan.tensor_at(position).planned;
  const py::buffer_info info = archive.request();
  run_unlocked([&] {
    return job.append_opaque(planned.fqn, planned.box, contents(info))
        .with_context("while saving '" + planned.fqn + "'");
  });
}

void append_bytes(engine::SaveJob& job, const std::string& fqn, const py::buffer& data) {
  const py::buffer_info info = data.request();
  run_unlocked([&] { return job.append_bytes(fqn, contents(info)).with_context("while saving '" + fqn + "'"); });
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

}  // namespace

void bind_save(py::module_& m) {
  py::class_<engine::SaveJob, SaveJobHolder>(m, "SaveJob", py::module_local())
      .def(py::init(&start_save), py::kw_only(), py::arg("directory"), py::arg("rank"), py::arg("direct_io"),
           py::arg("sync"), py::arg("one_file_a_record"), py::arg("num_io_threads"), py::arg("ring_bytes"),
           py::arg("expected_bytes"), py::arg("niceness"), py::arg("bytes_per_s"), py::arg("io_timeout_s"))
      .def("cancel", [](engine::SaveJob& job) { unlocked([&] { job.cancel(); }); })
      .def("append_tensors", &append_tensors, py::arg("plan"), py::arg("begin"), py::arg("values"))
      .def("append_state", &append_state, py::arg("plan"), py::arg("state_dict"))
      .def("append_opaque", &append_opaque, py::arg("plan"), py::arg("position"), py::arg("archive"))
      .def("append_bytes", &append_bytes, py::arg("fqn"), py::arg("data"))
      .def("finish",
           [](engine::SaveJob& job) {
             return py::bytes(value_unlocked([&]() -> base::Result<std::string> {
               BCP_ASSIGN_OR_RETURN(const format::WriteResult result, job.finish());
               return format::encode_write_result(result);
             }));
           })
      .def_property_readonly("file_names", &engine::SaveJob::file_names)
      .def_property_readonly("bytes_done", &engine::SaveJob::bytes_done)
      .def("stats", &save_stats);
}

}  // namespace bytecheckpoint::bindings
