// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>
#include <unistd.h>

#include "csrc/bindings/bind.h"
#include "csrc/bridge/checkpoint.h"
#include "csrc/bridge/gil.h"
#include "csrc/bridge/gil_yield.h"
#include "csrc/bridge/tensor_memories.h"
#include "csrc/bridge/torch_tensor.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/bridge/write_plan.h"
#include "csrc/engine/save/save_job.h"
#include "csrc/io/io_deadline.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

using base::Status;
using base::text;

/// Deletes a SaveJob in the background, since it may wait for storage that does not answer. In a forked child it is
/// leaked: the child has none of the job's threads, and the destructor would wait for them for ever.
struct EndSaveJob {
  pid_t owner = ::getpid();
  bool is_bounded = true;
  void operator()(engine::SaveJob* job) const {
    if (::getpid() != owner) return;
    const WithoutGil no_gil;
    io::DeleteInBackground{is_bounded}(job);
  }
};
using SaveJobHolder = std::unique_ptr<engine::SaveJob, EndSaveJob>;

SaveJobHolder start_save(std::string directory, uint32_t rank, bool direct_io, bool sync, bool one_file_a_record,
                         int num_io_threads, int64_t ring_bytes, int64_t expected_bytes, int niceness,
                         int64_t bytes_per_s, double io_timeout_s, double visibility_timeout_s, int64_t max_file_bytes,
                         std::shared_ptr<base::Trace> trace, bool has_hashes, std::shared_ptr<engine::LastSave> last,
                         int most_links) {
  engine::SaveOptions options{
      std::move(directory), rank,     direct_io,   sync,         one_file_a_record,    num_io_threads, ring_bytes,
      expected_bytes,       niceness, bytes_per_s, io_timeout_s, visibility_timeout_s, max_file_bytes};
  options.trace = std::move(trace);
  options.has_hashes = has_hashes;
  options.last = std::move(last);
  options.link_rule.most_links = most_links;
  return SaveJobHolder(value_unlocked([&] { return engine::SaveJob::start(std::move(options)); }).release(),
                       EndSaveJob{::getpid(), io_timeout_s > 0});
}

Status check_shape(const std::string& fqn, const tensor::Dims& planned, const tensor::Dims& got) {
  if (got == planned) return Status::ok();
  return Status::make(base::Code::kInvalidArgument,
                      text("while saving '", fqn, "': planned shape ", tensor::to_text(planned),
                           ", the planner resolved it to ", tensor::to_text(got)));
}

/// Narrows the view of a held box to the part that is written.
Status narrow(const LocalState& state, const Write& write, tensor::StridedView* view) {
  const tensor::Box held_box = state.inventory().box(state.inventory().entries[write.entry], write.box);
  BCP_RETURN_IF_ERROR(check_shape(write.planned.fqn, held_box.sizes, view->sizes));
  tensor::Dims begin = write.planned.box.offsets;
  for (size_t d = 0; d < begin.size(); ++d) begin[d] -= held_box.offsets[d];
  *view = tensor::part_of(std::move(*view), begin, write.planned.box.sizes);
  return Status::ok();
}

/// Raises InvalidPlanError for a plain tensor that is not inside its storage.
void check_memory_of(py::handle tensor, const std::string& fqn) {
  if (!is_plain_tensor(tensor.ptr())) return;
  raise_if_error(check_memory(tensor.ptr()).with_context(text("'", fqn, "'")));
}

/// Writes the tensors that the planner returned for positions [begin, begin + len(values)) of the plan. The list keeps
/// them alive meanwhile.
/// \param current_stream  See `TensorMemories`.
/// \returns positions in `values` that are not plain tensors within reach, and are left out.
std::vector<size_t> append_tensors(engine::SaveJob& job, const WritePlan& plan, size_t begin, const py::list& values,
                                   py::object current_stream) {
  TensorMemories memories(std::move(current_stream));
  std::vector<engine::TensorToWrite> ready;
  std::vector<size_t> left_out;
  for (size_t i = 0; i < values.size(); ++i) {
    const WriteItemFields& planned = plan.tensor_at(begin + i).planned;
    std::optional<staging::TensorMemory> memory = memories.memory_to_save(values[i]);
    if (!memory.has_value()) {
      check_memory_of(values[i], planned.fqn);  // Python will read its elements to store it in another way
      left_out.push_back(i);
      continue;
    }
    raise_if_error(check_shape(planned.fqn, planned.box.sizes, memory->view.sizes));
    ready.push_back({&planned.fqn, &planned.box, std::move(memory->view), memory->device});
  }
  run_unlocked([&] { return job.append_tensors(ready, memories.copies()); });
  return left_out;
}

/// Writes all tensors of a plan that was made from a local state.
/// \param state_dict  As the planner has it now. A value that is no longer the planned one is left out.
/// \param current_stream  See `TensorMemories`.
/// \returns positions in the plan that are left out, and those that are not plain tensors within reach.
std::vector<size_t> append_state(engine::SaveJob& job, const WritePlan& plan, const py::dict& state_dict,
                                 py::object current_stream) {
  const LocalState& state = *plan.state();
  TensorMemories memories(std::move(current_stream));
  std::vector<engine::TensorToWrite> ready;
  std::vector<const Write*> writes;  // the writes that are ready
  std::vector<py::object> alive;
  std::vector<size_t> left_out;
  GilYield gil_yield;
  OrderedLookup values(state_dict);
  for (size_t i = 0; i < plan.tensors().size(); ++i) {
    gil_yield.take();
    const Write& write = plan.tensors()[i];
    const StateValue& state_value = state.value_of(write.entry);
    if (state_value.kind != StateValue::Kind::kOther && is_still(state_value, &values)) {
      const py::object& local = alive.emplace_back(state_value.local(state.box_in_value(write.entry, write.box)));
      std::optional<staging::TensorMemory> memory = memories.memory_to_save(local);
      if (memory.has_value() && memory->view.dtype == write.planned.dtype->dtype) {
        ready.push_back({&write.planned.fqn, &write.planned.box, std::move(memory->view), memory->device});
        writes.push_back(&write);
        continue;
      }
    }
    left_out.push_back(i);
  }
  run_unlocked([&] {
    for (size_t i = 0; i < ready.size(); ++i) BCP_RETURN_IF_ERROR(narrow(state, *writes[i], &ready[i].view));
    return job.append_all(std::move(ready), memories.copies());
  });
  return left_out;
}

std::string_view contents(const py::buffer_info& info) {
  return {static_cast<const char*>(info.ptr), static_cast<size_t>(info.size * info.itemsize)};
}

void append_opaque(engine::SaveJob& job, const WritePlan& plan, size_t position, const py::buffer& archive) {
  const WriteItemFields& planned = plan.tensor_at(position).planned;
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
  out["bytes_linked"] = stats.bytes_linked;
  out["bytes_compared"] = stats.bytes_compared;
  return out;
}

/// Returns name, number of links and hashes of each file; see `StoredHashes`.
py::list hashes_of(const engine::LastSave& saved) {
  py::list out;
  for (const auto& [file, hashes] : unlocked([&] { return saved.hashes_by_file(); })) {
    out.append(py::make_tuple(file->entry.name, file->num_links, py::bytes(hashes)));
  }
  return out;
}

std::shared_ptr<engine::LastSave> last_save_of(const Checkpoint& checkpoint, const std::string& directory,
                                               uint32_t rank,
                                               const std::map<std::string, std::pair<int, std::string>>& hashes) {
  std::unordered_map<std::string, engine::StoredHashes> by_name;
  for (const auto& [name, stored] : hashes) by_name[name] = {stored.first, stored.second};
  const format::Manifest& manifest = checkpoint.whole();
  return std::make_shared<engine::LastSave>(
      unlocked([&] { return engine::last_save_of(manifest, directory, rank, by_name); }));
}

}  // namespace

void bind_save(py::module_& m) {
  m.def(
      "load_content_hash",
      [](const std::string& library) { run_unlocked([&] { return base::load_content_hash(library); }); },
      py::arg("library"));
  py::class_<engine::LastSave, std::shared_ptr<engine::LastSave>>(m, "LastSave", py::module_local())
      .def_static("of_checkpoint", &last_save_of, py::arg("checkpoint"), py::arg("directory"), py::arg("rank"),
                  py::arg("hashes"))
      .def_property_readonly("directory", [](const engine::LastSave& saved) { return saved.directory; })
      .def("hashes", &hashes_of);
  m.def("check_memory", &check_memory_of, py::arg("tensor"), py::arg("fqn"));
  py::class_<engine::SaveJob, SaveJobHolder>(m, "SaveJob", py::module_local())
      .def(py::init(&start_save), py::kw_only(), py::arg("directory"), py::arg("rank"), py::arg("direct_io"),
           py::arg("sync"), py::arg("one_file_a_record"), py::arg("num_io_threads"), py::arg("ring_bytes"),
           py::arg("expected_bytes"), py::arg("niceness"), py::arg("bytes_per_s"), py::arg("io_timeout_s"),
           py::arg("visibility_timeout_s") = 0.0, py::arg("max_file_bytes") = 0, py::arg("trace") = py::none(),
           py::arg("has_hashes") = false, py::arg("last") = py::none(), py::arg("most_links") = 0)
      .def("cancel", [](engine::SaveJob& job) { unlocked([&] { job.cancel(); }); })
      .def("append_tensors", &append_tensors, py::arg("plan"), py::arg("begin"), py::arg("values"),
           py::arg("current_stream"))
      .def("append_state", &append_state, py::arg("plan"), py::arg("state_dict"), py::arg("current_stream"))
      .def("append_opaque", &append_opaque, py::arg("plan"), py::arg("position"), py::arg("archive"))
      .def("append_bytes", &append_bytes, py::arg("fqn"), py::arg("data"))
      .def("finish",
           [](engine::SaveJob& job) {
             return py::bytes(value_unlocked([&]() -> base::Result<std::string> {
               BCP_ASSIGN_OR_RETURN(const format::WriteResult result, job.finish());
               return format::encode_write_result(result);
             }));
           })
      .def("take_saved", [](engine::SaveJob& job) { return std::make_shared<engine::LastSave>(job.take_saved()); })
      .def_property_readonly("not_linked_because",
                             [](const engine::SaveJob& job) { return job.not_linked_because().message(); })
      .def_property_readonly("link_names", &engine::SaveJob::link_names)
      .def_property_readonly("file_names", &engine::SaveJob::file_names)
      .def_property_readonly("bytes_done", &engine::SaveJob::bytes_done)
      .def("stats", &save_stats);
}

}  // namespace bytecheckpoint::bindings
