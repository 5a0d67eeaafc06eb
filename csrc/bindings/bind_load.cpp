// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <atomic>
#include <cstring>
#include <string>
#include <unordered_map>

#include "csrc/bindings/bind.h"
#include "csrc/bindings/py_load_job.h"
#include "csrc/bridge/checkpoint.h"
#include "csrc/bridge/dtensor_pieces.h"
#include "csrc/bridge/flatten.h"
#include "csrc/bridge/gil.h"
#include "csrc/bridge/read_plan.h"
#include "csrc/bridge/tensor_memories.h"
#include "csrc/bridge/torch_tensor.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/engine/load/load_job.h"
#include "csrc/engine/load/wanted_box.h"
#include "csrc/io/io_deadline.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

using base::text;

/// Returns the bytes that all runs of the plan want together.
int64_t bytes_wanted(const PyLoadJob& self) {
  int64_t bytes = 0;
  for (size_t i = 0; i < self.places.size(); ++i) {
    const Read& read = self.plan.tensors()[i];
    const auto& place = self.places[i];
    int64_t numel = 0;
    if (!place.has_value()) {
      bytes += read.chunk->record.bytes;
      continue;
    }
    const planner::WantedBox wanted = engine::wanted_of(*read.chunk, *place, read.planned.box);
    if (tensor::checked_numel(wanted.sizes, &numel)) bytes += numel * wanted.itemsize_bytes;
  }
  for (const Read& read : self.plan.objects()) {
    if (read.chunk->record.kind != format::RecordKind::kInline) bytes += read.chunk->record.bytes;
  }
  return bytes;
}

std::unique_ptr<PyLoadJob> start_load(const Checkpoint& checkpoint, const ReadPlan& plan, const std::string& directory,
                                      engine::Scope rank, bool direct_io, bool verify, int num_io_threads,
                                      int64_t ring_bytes, double io_timeout_s, double visibility_timeout_s,
                                      std::shared_ptr<base::Trace> trace, py::object current_stream) {
  std::vector<engine::ChunkInRecord> chunks;
  std::vector<const format::Chunk*> all;
  for (const Read& read : plan.tensors()) {
    chunks.push_back({read.chunk, read.view});
    all.push_back(read.chunk);
  }
  for (const Read& read : plan.objects()) all.push_back(read.chunk);
  auto bytes_done = std::make_shared<std::atomic<int64_t>>(0);
  engine::LoadOptions options{plan.manifest()->data_directory(directory),
                              rank,
                              direct_io,
                              verify,
                              num_io_threads,
                              ring_bytes,
                              {},
                              io_timeout_s,
                              visibility_timeout_s,
                              std::move(trace)};
  options.progress = [bytes_done](int64_t bytes) { *bytes_done = bytes; };
  engine::LoadJob job(options, plan.manifest());
  using Places = std::vector<std::optional<engine::TensorPlace>>;
  auto places = value_unlocked([&]() -> base::Result<Places> {
    // Keeps the manifest, and so the chunks, for as long as the call takes.
    const auto locate = [directory = options.directory, manifest = job.manifest(), chunks = std::move(chunks),
                         all = std::move(all)]() -> base::Result<Places> {
      BCP_RETURN_IF_ERROR(engine::check_extents(directory, *manifest, all));
      return engine::locate_tensors(directory, *manifest, chunks);
    };
    auto located = io::run_with_deadline(io_timeout_s, "open", options.directory, locate);
    // A newer commit may be the reason why a file is missing or short.
    if (!located.is_ok()) return job.explain(located.status());
    return located;
  });
  std::unique_ptr<PyLoadJob> out(new PyLoadJob{plan,
                                               std::move(job),
                                               std::move(places),
                                               {},
                                               0,
                                               std::move(bytes_done),
                                               TensorMemories(std::move(current_stream)),
                                               {}});
  out->job.destinations().set_copies(out->memories.copies());
  return out;
}

/// Checks the target of part `position` of the plan, or a tensor within it, whose memory the job does not fill itself:
/// `copy_` would fill it wherever it is. Raises InvalidPlanError. A tensor of a subclass passes: its memory may be
/// elsewhere.
void check_target(PyLoadJob& self, size_t position, py::handle target) {
  if (!is_plain_tensor(target.ptr())) return;
  base::Status checked = check_memory(target.ptr(), &self.read_only);
  if (!checked.is_ok())
    raise(std::move(checked).with_context(text("'", self.plan.tensor_at(position).planned.fqn, "'")));
}

/// Adds part `position` of the plan to what the run may fill itself, if the checkpoint has it as `memory` does.
void add_target(const PyLoadJob& self, size_t position, const staging::TensorMemory& memory, size_t tensor,
                const staging::TensorMemory& whole, staging::LoadTargets* targets) {
  const auto& place = self.places[position];
  if (place.has_value() && memory.view.dtype == place->dtype) {
    targets->add(position, memory, tensor, whole);
  } else {
    targets->leave_out(position, tensor, whole);
  }
}

/// Adds the destinations that the run may fill in any order. The others are left out, as are those on devices that are
/// better filled through the host.
void add_targets(PyLoadJob& self, staging::LoadTargets* targets, std::vector<size_t>* left_out) {
  for (const staging::LoadTargets::Part& part : targets->take_apart(left_out)) {
    const Read& read = self.plan.tensors()[part.number];
    const base::Status added =
        self.job.destinations().add_tensor(read.planned.fqn, *read.chunk, *self.places[part.number], read.planned.box,
                                           part.memory.view, part.memory.device);
    if (added.code() == base::Code::kUnsupported) {
      left_out->push_back(part.number);
    } else {
      raise_if_error(added);
    }
  }
  std::sort(left_out->begin(), left_out->end());
}

/// Adds destinations of tensors [begin, begin + len(memories)) of the plan; the caller keeps them alive until the run.
/// \returns positions in the plan that cannot be filled directly: other dtype, device or layout, opaque records, memory
/// that a tensor before it fills.
std::vector<size_t> add_tensors(PyLoadJob& self, size_t begin, const py::list& memories) {
  std::vector<size_t> left_out;
  staging::LoadTargets targets;
  std::unordered_map<std::string, size_t> tensors;  // their numbers
  for (size_t i = 0; i < memories.size(); ++i) {
    const PlannedRead& planned = self.plan.tensor_at(begin + i).planned;
    PyObject* const target = py::handle(memories[i]).ptr();
    const std::optional<tensor::Dims> sizes = sizes_of_tensor(target);
    if (!sizes.has_value() || *sizes != planned.box.sizes) {
      raise_as("ShapeMismatchError", text("'", planned.fqn, "': wanted ", tensor::to_text(planned.box.sizes), ", got ",
                                          sizes.has_value() ? "a tensor of " + tensor::to_text(*sizes) : "no tensor"));
    }
    const std::optional<staging::TensorMemory> memory = self.memories.memory_to_fill(target);
    if (!memory.has_value()) {
      check_target(self, begin + i, target);
      left_out.push_back(begin + i);
      continue;
    }
    const size_t number = tensors.try_emplace(text(planned.fqn, ' ', storage_of(target)), tensors.size()).first->second;
    add_target(self, begin + i, *memory, number, *memory, &targets);
  }
  add_targets(self, &targets, &left_out);
  return left_out;
}

/// Adds the tensors of the state dict that the plan was made from.
/// \param state_dict  As the planner has it now. A value that is no longer the planned one is left out.
/// \returns positions in the plan that are left out, and those that cannot be filled directly.
std::vector<size_t> add_state(PyLoadJob& self, const py::dict& state_dict) {
  constexpr size_t kNone = SIZE_MAX;
  const std::vector<StateValue>& state = self.plan.state();
  std::vector<size_t> left_out;
  staging::LoadTargets targets;
  OrderedLookup values(state_dict);
  std::optional<staging::TensorMemory> memory;
  size_t num_tensors = 0;
  for (size_t i = 0, last = kNone, last_box = 0; i < self.plan.tensors().size(); ++i) {
    const Read& read = self.plan.tensors()[i];
    const StateValue& state_value = state[read.state_index];
    if (state_value.kind == StateValue::Kind::kOther || !is_still(state_value, &values)) {
      left_out.push_back(i);
      continue;
    }
    if (read.state_index != last || read.box != last_box) {
      last = read.state_index;
      last_box = read.box;
      const py::object local = state_value.local(read.box);
      memory = self.memories.memory_to_fill(local);
      if (!memory.has_value()) check_target(self, i, local);
      if (memory.has_value() && memory->view.sizes != state_value.boxes[read.box].sizes) {
        raise_as("ShapeMismatchError", text("'", state_value.fqn, "': the box of this rank is of ",
                                            tensor::to_text(state_value.boxes[read.box].sizes),
                                            ", but its tensor is of ", tensor::to_text(memory->view.sizes)));
      }
      if (memory.has_value()) {
        self.alive.push_back(local);
        ++num_tensors;
      }
    }
    if (!memory.has_value()) {
      left_out.push_back(i);
      continue;
    }
    const tensor::StridedView part = tensor::part_of(memory->view, read.to, read.planned.box.sizes);
    add_target(self, i, {memory->device, part}, num_tensors - 1, *memory, &targets);
  }
  add_targets(self, &targets, &left_out);
  return left_out;
}

/// Adds the destination of a whole record of bytes.
void add_record(PyLoadJob& self, const Read& read, const py::buffer& buffer) {
  const py::buffer_info info = buffer.request(/*writable=*/true);
  if (info.size * info.itemsize != read.chunk->record.bytes) {
    throw py::value_error("'" + read.planned.fqn + "': the buffer and the record differ in size");
  }
  self.job.destinations().add_bytes(read.chunk->record, static_cast<uint8_t*>(info.ptr));
}

py::dict run_load(PyLoadJob& self) {
  // Looks for Ctrl-C between segments. The error that the handler raised stays set.
  bool interrupted = false;
  const auto cancelled = [&] {
    const WithGil locked;
    interrupted = PyErr_CheckSignals() != 0;
    return interrupted;
  };
  auto result = unlocked([&] { return self.job.run(cancelled); });
  if (interrupted) throw py::error_already_set();
  return self.finish(value_or_raise(std::move(result)));
}

py::list to_python(const std::vector<Cast>& casts) {
  py::list out;
  for (const Cast& cast : casts) {
    out.append(py::make_tuple(to_text(cast.fqn), tensor::find_dtype(cast.from)->name, cast.to));
  }
  return out;
}

std::unique_ptr<ReadPlan> plan_state(const Checkpoint& checkpoint, const py::dict& flat, py::object chunks_of,
                                     bool allow_partial, bool refuse_unexpected, const py::object& refuse_casts) {
  Strictness strictness{allow_partial, refuse_unexpected, {}};
  if (!refuse_casts.is_none()) {
    strictness.refuse_casts = [&](const std::vector<Cast>& casts) {
      return refuse_casts(to_python(casts)).cast<std::string>();
    };
  }
  StateScanner scanner(std::move(chunks_of), StateScanner::Use::kFill);
  return std::make_unique<ReadPlan>(checkpoint, scanner.scan(flat), strictness);
}

}  // namespace

py::dict PyLoadJob::finish(const engine::LoadStats& stats) {
  *bytes_done_now = 0;
  bytes_done_before += stats.bytes_wanted;
  if (!has_more()) {
    std::vector<PyObject*> filled;
    for (const py::object& tensor : alive) filled.push_back(tensor.ptr());
    increment_versions(filled);
    alive.clear();
  }
  py::dict out;
  out["num_boxes"] = stats.num_boxes;
  out["num_files"] = stats.num_files;
  out["bytes_wanted"] = stats.bytes_wanted;
  out["bytes_read"] = stats.bytes_read;
  out["bytes_received"] = stats.bytes_received;
  out["seconds"] = stats.seconds;
  return out;
}

// NOLINTNEXTLINE(readability-function-size): a list of what Python sees.
void bind_load(py::module_& m) {
  m.def(
      "flatten_state_dict",
      [](const py::object& state_dict) {
        FlatState flat = flatten_state_dict(state_dict);
        return py::make_tuple(std::move(flat.values), std::move(flat.mappings));
      },
      py::arg("state_dict"));
  py::class_<SpecialTensors>(m, "SpecialTensors", py::module_local())
      .def_readonly("has_sharded_tensor", &SpecialTensors::has_sharded_tensor)
      .def_readonly("has_meta_tensor", &SpecialTensors::has_meta_tensor)
      .def_readonly("subclasses", &SpecialTensors::subclasses)
      .def_readonly("copies", &SpecialTensors::copies);
  m.def("find_special_tensors", &find_special_tensors, py::arg("flat"));
  m.def("find_pieces", &find_pieces, py::arg("flat"), py::arg("order_of"), py::arg("pieces_of"),
        py::arg("is_in_order"));
  py::class_<ReadPlan>(m, "ReadPlan", py::module_local())
      .def(py::init<const Checkpoint&, const py::iterable&>(), py::keep_alive<1, 2>(), py::arg("checkpoint"),
           py::arg("items"))
      .def_static("of_state", &plan_state, py::keep_alive<0, 1>(), py::arg("checkpoint"), py::arg("flat"),
                  py::arg("chunks_of"), py::arg("allow_partial"), py::arg("refuse_unexpected") = false,
                  py::arg("refuse_casts") = py::none())
      .def("is_of", &ReadPlan::is_of, py::arg("checkpoint"))
      .def_property_readonly("checkpoint", &ReadPlan::checkpoint, py::return_value_policy::reference_internal)
      .def("casts", [](const ReadPlan& plan) { return to_python(plan.casts()); })
      .def("objects_into_tensors", &ReadPlan::objects_into_tensors)
      .def_property_readonly("num_items", &ReadPlan::num_items)
      .def_property_readonly("num_tensors", [](const ReadPlan& plan) { return plan.tensors().size(); })
      .def_property_readonly("num_objects", [](const ReadPlan& plan) { return plan.objects().size(); })
      .def_property_readonly("num_bytes", &ReadPlan::num_bytes)
      .def("tensor_item", &ReadPlan::tensor_item, py::arg("position"))
      .def("object_item", &ReadPlan::object_item, py::arg("position"))
      .def(
          "object_fqn", [](const ReadPlan& plan, size_t position) { return plan.object_at(position).planned.fqn; },
          py::arg("position"))
      .def("items", &ReadPlan::items);
  py::class_<PyLoadJob>(m, "LoadJob", py::module_local())
      .def(py::init(&start_load), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::arg("checkpoint"),
           py::arg("plan"), py::kw_only(), py::arg("directory"), py::arg("rank"), py::arg("direct_io"),
           py::arg("verify"), py::arg("num_io_threads"), py::arg("ring_bytes"), py::arg("io_timeout_s"),
           py::arg("visibility_timeout_s") = 0.0, py::arg("trace") = py::none(), py::arg("current_stream"))
      .def("add_tensors", &add_tensors, py::arg("begin"), py::arg("targets"))
      .def("add_state", &add_state, py::arg("state_dict"))
      .def("check_target", &check_target, py::arg("position"), py::arg("target"))
      .def(
          "stored_dtype",
          [](const PyLoadJob& self, size_t position) -> std::string {
            (void)self.plan.tensor_at(position);
            const auto& place = self.places[position];
            return place.has_value() ? tensor::find_dtype(place->dtype)->name : "";
          },
          py::arg("position"))
      .def(
          "archive_bytes",
          [](const PyLoadJob& self, size_t position) { return self.plan.tensor_at(position).chunk->record.bytes; },
          py::arg("position"))
      .def(
          "add_archive",
          [](PyLoadJob& self, size_t position, const py::buffer& buffer) {
            add_record(self, self.plan.tensor_at(position), buffer);
          },
          py::arg("position"), py::arg("buffer"))
      .def(
          "object_bytes",
          [](const PyLoadJob& self, size_t position) { return self.plan.object_at(position).chunk->record.bytes; },
          py::arg("position"))
      .def(
          "add_object",
          [](PyLoadJob& self, size_t position, const py::buffer& buffer) {
            add_record(self, self.plan.object_at(position), buffer);
          },
          py::arg("position"), py::arg("buffer"))
      .def_property_readonly("bytes_wanted", &bytes_wanted)
      .def_property_readonly("bytes_done",
                             [](const PyLoadJob& self) { return self.bytes_done_before + *self.bytes_done_now; })
      .def_property_readonly("has_more", [](PyLoadJob& self) { return self.has_more(); })
      .def("run", &run_load);
}

}  // namespace bytecheckpoint::bindings
