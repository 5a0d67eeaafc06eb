// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/bindings/bind.h"
#include "csrc/bindings/py_load_job.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/engine/load/shared_memory.h"
#include "csrc/engine/load/shared_run.h"
#include "csrc/engine/load/wanted_box.h"
#include "csrc/io/file_system.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

/// A SharedRun, and the job whose destinations it fills.
struct PySharedRun {
  PyLoadJob& job;
  std::unique_ptr<engine::SharedRun> run;
};

base::Result<planner::SharePlan> plan_of(const std::vector<std::string>& ranges_by_rank) {
  std::vector<std::vector<planner::BlockRange>> wanted;
  for (const std::string& ranges : ranges_by_rank) {
    BCP_ASSIGN_OR_RETURN(wanted.emplace_back(), planner::decode_ranges(ranges, format::kBlockBytes));
  }
  return planner::plan_share(wanted, format::kBlockBytes, staging::kSlotBytes);
}

/// Returns what the next run wants, as an encoded list of ranges.
py::bytes next_ranges(PyLoadJob& self) {
  return value_unlocked([&]() -> base::Result<std::string> {
    return planner::encode_ranges(engine::wanted_blocks(&self.job).merged(), format::kBlockBytes);
  });
}

/// Returns what all runs of the plan will want, as an encoded list of ranges.
py::bytes all_ranges(const PyLoadJob& self) {
  return value_unlocked([&]() -> base::Result<std::string> {
    std::vector<planner::WantedBox> wanted;
    for (size_t i = 0; i < self.plan.tensors().size(); ++i) {
      const Read& read = self.plan.tensors()[i];
      const auto& place = self.places[i];
      wanted.push_back(place.has_value() ? engine::wanted_of(*read.chunk, *place, read.planned.box)
                                         : engine::wanted_of(read.chunk->record));
    }
    for (const Read& read : self.plan.objects()) wanted.push_back(engine::wanted_of(read.chunk->record));
    return planner::encode_ranges(planner::find_wanted_blocks(wanted, format::kBlockBytes).merged(),
                                  format::kBlockBytes);
  });
}

std::unique_ptr<planner::SharePlan> make_plan(const std::vector<std::string>& ranges_by_rank) {
  return std::make_unique<planner::SharePlan>(value_unlocked([&] { return plan_of(ranges_by_rank); }));
}

/// Returns [(owner, bytes, [ranks that want it, ...]), ...].
py::list list_units(const planner::SharePlan& plan, uint32_t rank) {
  py::list out;
  for (const engine::SharedUnit& unit : engine::units_of(plan, rank)) {
    out.append(py::make_tuple(unit.owner, unit.segment.bytes, unit.wanted_by));
  }
  return out;
}

using Address = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;

std::unique_ptr<engine::SharedMemory> map_memory(const PyLoadJob& job) {
  return value_unlocked([&] { return engine::SharedMemory::map(job.job.options().ring_bytes); });
}

Address address_of(const engine::SharedMemory& self) {
  const staging::RingAddress found = value_or_raise(self.address());
  return {found.pid, found.fd, found.device, found.inode, found.num_slots};
}

void open_peer(engine::SharedMemory& self, uint32_t rank, const Address& address) {
  const auto& [pid, fd, device, inode, num_slots] = address;
  const staging::RingAddress at{pid, fd, device, inode, num_slots};
  run_unlocked([&] { return self.open(rank, at); });
}

std::unique_ptr<PySharedRun> start_run(PyLoadJob& job, const planner::SharePlan& plan, uint32_t rank,
                                       engine::SharedMemory* memory) {
  auto run = value_unlocked([&] { return engine::SharedRun::start(&job.job, plan, rank, memory); });
  return std::unique_ptr<PySharedRun>(new PySharedRun{job, std::move(run)});
}

py::object next_own(PySharedRun& self, bool wait) {
  const auto own = value_unlocked([&] { return self.run->next_own(wait); });
  if (!own.has_value()) return py::none();
  return py::make_tuple(own->unit, own->slot, own->bytes);
}

const uint8_t* checked_memory(const PySharedRun& self, size_t unit, int slot) {
  const uint8_t* memory = self.run->memory_of(unit, slot);
  if (memory == nullptr) throw py::index_error("no such unit or slot");
  return memory;
}

}  // namespace

void bind_sharing(py::module_& m) {
  m.def(
      "is_in_memory",
      [](const std::string& path, double io_timeout_s) {
        return value_unlocked([&] { return io::is_in_memory(path, io_timeout_s); });
      },
      py::arg("path"), py::arg("io_timeout_s"));
  m.def("next_ranges", &next_ranges, py::arg("job"));
  m.def("all_ranges", &all_ranges, py::arg("job"));
  m.def(
      "digest_of", [](const Checkpoint& checkpoint) { return engine::digest_of(checkpoint.head()); },
      py::arg("checkpoint"));
  py::class_<planner::SharePlan>(m, "SharePlan", py::module_local())
      .def(py::init(&make_plan), py::arg("ranges_by_rank"))
      .def_readonly("bytes_wanted", &planner::SharePlan::bytes_wanted)
      .def_readonly("bytes_distinct", &planner::SharePlan::bytes_distinct)
      .def("units", &list_units, py::arg("rank"));
  py::class_<engine::SharedMemory>(m, "SharedMemory", py::module_local())
      .def(py::init(&map_memory), py::arg("job"))
      .def_property_readonly("address", &address_of)
      .def("open", &open_peer, py::arg("rank"), py::arg("address"));
  py::class_<PySharedRun>(m, "SharedRun", py::module_local())
      .def(py::init(&start_run), py::keep_alive<1, 2>(), py::keep_alive<1, 5>(), py::arg("job"), py::arg("plan"),
           py::arg("rank"), py::arg("memory").none(true))
      .def_property_readonly("verifies", [](const PySharedRun& self) { return self.job.job.options().verify; })
      .def_property_readonly("num_own_slots", [](const PySharedRun& self) { return self.run->num_own_slots(); })
      .def_property_readonly("num_slots", [](const PySharedRun& self) { return self.run->num_slots(); })
      .def(
          "slot",
          [](const PySharedRun& self, int slot) {
            if (slot < 0 || slot >= self.run->num_slots()) throw py::index_error("no such slot");
            return py::memoryview::from_memory(self.run->slot(slot), staging::kSlotBytes);
          },
          py::keep_alive<0, 1>(), py::arg("slot"))
      .def("next_own", &next_own, py::arg("wait"))
      .def(
          "check",
          [](PySharedRun& self, size_t unit, int slot, int64_t bytes, bool is_verified) {
            const uint8_t* memory = checked_memory(self, unit, slot);
            run_unlocked([&] { return self.run->check(unit, memory, bytes, is_verified); });
          },
          py::arg("unit"), py::arg("slot"), py::arg("bytes"), py::arg("is_verified"))
      .def(
          "scatter",
          [](PySharedRun& self, size_t unit, int slot, int64_t bytes) {
            const uint8_t* memory = checked_memory(self, unit, slot);
            run_unlocked([&] { return self.run->scatter(unit, memory, bytes); });
          },
          py::arg("unit"), py::arg("slot"), py::arg("bytes"))
      .def(
          "release", [](PySharedRun& self, int slot) { self.run->release(slot); }, py::arg("slot"))
      .def("finish",
           [](PySharedRun& self) { return self.job.finish(value_unlocked([&] { return self.run->finish(); })); });
}

}  // namespace bytecheckpoint::bindings
