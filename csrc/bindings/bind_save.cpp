// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>
#include <unistd.h>

#include "csrc/bindings/bind_engine.h"
#include "csrc/bindings/dcp_objects.h"
#include "csrc/bindings/torch_tensor.h"
#include "csrc/bindings/unlocked.h"
#include "csrc/engine/save_job.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using base::Status;
using base::text;

/// The items of a SavePlan, their fields read once.
struct WritePlan {
  explicit WritePlan(const py::iterable& plan_items) {
    for (const py::handle item : plan_items) {
      PlannedWrite write = read_write_item(item);
      (write.is_tensor ? tensors : objects).append(item);
      if (!write.is_tensor) continue;
      const int64_t bytes = planned_bytes(write);
      tensor_bytes.push_back(bytes);
      num_bytes += bytes;
      writes.push_back(std::move(write));
    }
  }

  /// An estimate only: tensors may resolve to another dtype.
  static int64_t planned_bytes(const PlannedWrite& write) {
    int64_t bytes = 0;
    if (!tensor::checked_numel(write.box.sizes, &bytes) ||
        !base::checked_mul(bytes, write.dtype->itemsize_bytes, &bytes)) {
      raise(Status::make(base::Code::kInvalidArgument,
                         text("'", write.fqn, "': impossible shape ", tensor::to_text(write.box.sizes))));
    }
    return bytes;
  }

  /// Ranges of tensors of about `limit_bytes` each.
  std::vector<std::pair<size_t, size_t>> batches(int64_t limit_bytes) const {
    std::vector<std::pair<size_t, size_t>> ranges;
    int64_t bytes = 0;
    size_t begin = 0;
    for (size_t i = 0; i < writes.size(); ++i) {
      bytes += tensor_bytes[i];
      if (bytes < limit_bytes && i + 1 < writes.size()) continue;
      ranges.emplace_back(begin, i + 1);
      begin = i + 1;
      bytes = 0;
    }
    return ranges;
  }

  py::list tensors, objects;  // the items themselves
  std::vector<PlannedWrite> writes;
  std::vector<int64_t> tensor_bytes;
  int64_t num_bytes = 0;
};

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

const PlannedWrite& write_at(const WritePlan& plan, size_t position) {
  if (position >= plan.writes.size()) throw py::index_error("no such tensor in the plan");
  return plan.writes[position];
}

/// Writes what the planner resolved tensors [begin, begin + len(values)) to; the list keeps them alive meanwhile.
/// \returns positions in `values` that are not plain host tensors, which are left out.
std::vector<size_t> append_tensors(engine::SaveJob& job, const WritePlan& plan, size_t begin, const py::list& values) {
  struct Ready {
    const PlannedWrite* planned;
    tensor::StridedView view;
  };
  std::vector<Ready> ready;
  std::vector<size_t> left_out;
  for (size_t i = 0; i < values.size(); ++i) {
    const PlannedWrite& planned = write_at(plan, begin + i);
    base::Result<tensor::StridedView> view = view_of_plain_tensor(values[i].ptr());
    if (!view.is_ok()) {
      left_out.push_back(i);
      continue;
    }
    if (view.value().sizes != planned.box.sizes) {
      raise(Status::make(base::Code::kInvalidArgument,
                         text("while saving '", planned.fqn, "': planned shape ", tensor::to_text(planned.box.sizes),
                              ", the planner resolved it to ", tensor::to_text(view.value().sizes))));
    }
    ready.push_back({&planned, std::move(view.value())});
  }
  run_unlocked([&] {
    for (const Ready& r : ready) {
      Status outcome = job.append_tensor(r.planned->fqn, r.planned->box, r.view);
      if (!outcome.is_ok()) return std::move(outcome).with_context("while saving '" + r.planned->fqn + "'");
    }
    return Status::ok();
  });
  return left_out;
}

std::string_view contents(const py::buffer_info& info) {
  return {static_cast<const char*>(info.ptr), static_cast<size_t>(info.size * info.itemsize)};
}

void append_opaque(engine::SaveJob& job, const WritePlan& plan, size_t position, const py::buffer& archive) {
  const PlannedWrite& planned = write_at(plan, position);
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
  py::class_<WritePlan>(m, "WritePlan", py::module_local())
      .def(py::init<const py::iterable&>(), py::arg("items"))
      .def_readonly("tensors", &WritePlan::tensors)
      .def_readonly("objects", &WritePlan::objects)
      .def_readonly("num_bytes", &WritePlan::num_bytes)
      .def("batches", &WritePlan::batches, py::arg("limit_bytes"));
  py::class_<engine::SaveJob, SaveJobHolder>(m, "SaveJob", py::module_local())
      .def(py::init(&start_save), py::kw_only(), py::arg("directory"), py::arg("rank"), py::arg("direct_io"),
           py::arg("sync"), py::arg("one_file_a_record"), py::arg("num_io_threads"), py::arg("ring_bytes"),
           py::arg("expected_bytes"))
      .def("append_tensors", &append_tensors, py::arg("plan"), py::arg("begin"), py::arg("values"))
      .def("append_opaque", &append_opaque, py::arg("plan"), py::arg("position"), py::arg("archive"))
      .def("append_bytes", &append_bytes, py::arg("fqn"), py::arg("data"))
      .def("finish",
           [](engine::SaveJob& job) {
             const format::WriteResult result = value_unlocked([&] { return job.finish(); });
             return py::bytes(format::encode_write_result(result));
           })
      .def_property_readonly("file_names", &engine::SaveJob::file_names)
      .def("stats", &save_stats);
}

}  // namespace bytecheckpoint::bindings
