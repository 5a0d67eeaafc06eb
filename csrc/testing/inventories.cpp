// SPDX-License-Identifier: Apache-2.0
#include "csrc/testing/bindings.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>

#include "csrc/bridge/dims_caster.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/planner/inventory_blob.h"
#include "csrc/planner/merge_inventories.h"
#include "csrc/planner/rank_assignment.h"
#include "csrc/planner/save_plan.h"
#include "csrc/planner/validate.h"

namespace bytecheckpoint::testing {
namespace {

namespace py = pybind11;
using namespace bridge;

using planner::Inventory;
using tensor::Dims;

/// (fqn, kind, path, can_split, dtype, sizes, boxes, requires_grad, pin_memory, memory_format)
using EntryTuple = std::tuple<std::string, std::string, py::bytes, bool, std::string, Dims,
                              std::vector<std::pair<Dims, Dims>>, bool, bool, uint8_t>;

planner::EntryKind kind_of(const std::string& name) {
  if (name == "tensor") return planner::EntryKind::kTensor;
  if (name == "shard") return planner::EntryKind::kShard;
  if (name != "bytes") throw py::value_error("kind '" + name + "': bytes, tensor or shard");
  return planner::EntryKind::kBytes;
}

std::shared_ptr<Inventory> inventory_of_rank(uint32_t rank, const py::iterable& entries) {
  planner::InventoryBuilder builder(rank);
  for (const py::handle item : entries) {
    auto [fqn, kind, path, can_split, dtype, sizes, boxes, requires_grad, pin_memory, memory_format] =
        item.cast<EntryTuple>();
    const tensor::DTypeInfo* dtype_info = tensor::find_dtype(std::string_view(dtype));
    tensor::TensorInfo info;
    info.dtype = dtype_info == nullptr ? tensor::DType::kNone : dtype_info->dtype;
    info.requires_grad = requires_grad;
    info.pin_memory = pin_memory;
    info.memory_format = memory_format;
    info.sizes = std::move(sizes);
    std::vector<tensor::Box> held;
    for (auto& [offsets, box_sizes] : boxes) held.push_back(tensor::Box{std::move(offsets), std::move(box_sizes)});
    raise_if_error(builder.add(fqn, kind_of(kind), std::string_view(path), info, can_split, held));
  }
  return std::make_shared<Inventory>(value_or_raise(builder.finish()));
}

std::shared_ptr<Inventory> merge(const py::iterable& blobs) {
  const py::tuple kept(blobs);  // keeps the bytes alive
  std::vector<std::string_view> views;
  for (const py::handle blob : kept) views.emplace_back(std::string_view(blob.cast<py::bytes>()));
  return std::make_shared<Inventory>(value_unlocked([&] { return planner::merge_inventories(views); }));
}

/// A plan, and the inventory whose boxes its numbers refer to.
struct PlanOfInventory {
  std::shared_ptr<const Inventory> inventory;
  planner::SavePlan plan;
  std::vector<std::string> assignments;  // encoded when the first one is asked for

  const std::string& assignment(uint32_t rank) {
    if (rank >= plan.rank_bytes.size()) throw py::index_error("rank " + std::to_string(rank));
    if (assignments.empty()) assignments = planner::encode_assignments(*inventory, plan);
    return assignments[rank];
  }

  /// Returns {"num_ranks", "num_chunks", "num_splits", "total_bytes", "max_bytes"}.
  py::dict summary() const {
    const auto unsplit = std::count_if(plan.writers.begin(), plan.writers.end(), [](uint32_t writer) {
      return writer != planner::SavePlan::kNobody && !planner::SavePlan::is_split(writer);
    });
    py::dict out;
    out["num_ranks"] = plan.rank_bytes.size();
    out["num_chunks"] = static_cast<size_t>(unsplit) + plan.parts.size();
    out["num_splits"] = plan.first_part.size() - 1;
    out["total_bytes"] = plan.total_bytes();
    out["max_bytes"] = plan.max_bytes();
    return out;
  }

  /// Returns [(fqn, [(rank, offsets, sizes), ...]), ...] in the order of the metadata.
  py::list chunks() const {
    py::list out;
    for (const planner::Entry& entry : inventory->entries) {
      py::list of_entry;
      for (const planner::PlannedChunk& c : planner::chunks_of(*inventory, plan, entry)) {
        of_entry.append(py::make_tuple(c.rank, c.box.offsets, c.box.sizes));
      }
      out.append(py::make_tuple(std::string(inventory->fqn(entry)), of_entry));
    }
    return out;
  }
};

PlanOfInventory plan_save(std::shared_ptr<Inventory> inventory, bool dedup_to_lowest_rank, int64_t min_part_bytes) {
  planner::SaveOptions options;
  options.dedup_to_lowest_rank = dedup_to_lowest_rank;
  options.min_part_bytes = min_part_bytes;
  planner::SavePlan plan = value_unlocked([&] { return planner::plan_save(*inventory, options); });
  return PlanOfInventory{std::move(inventory), std::move(plan), {}};
}

/// Returns [(fqn, offsets, sizes, is_whole), ...] in the order of the rank's state dict.
py::list apply_assignment(const Inventory& local, const py::bytes& assignment) {
  py::list out;
  for (const planner::PlannedWrite& w :
       value_or_raise(planner::apply_assignment(local, std::string_view(assignment)))) {
    out.append(py::make_tuple(std::string(local.fqn(local.entries[w.entry])), w.box.offsets, w.box.sizes, w.is_whole));
  }
  return out;
}

}  // namespace

void bind_inventories(py::module_& m) {
  py::class_<Inventory, std::shared_ptr<Inventory>>(m, "Inventory")
      .def_static("of_rank", &inventory_of_rank, py::arg("rank"), py::arg("entries"))
      .def_static("merge", &merge, py::arg("blobs"))
      .def("encode", [](const Inventory& self) { return py::bytes(planner::encode_inventory(self)); })
      .def("validate", [](const Inventory& self) { run_unlocked([&] { return planner::validate_inventory(self); }); })
      .def_property_readonly("num_ranks", [](const Inventory& self) { return self.rank_sets.size(self.ranks); })
      .def_property_readonly("num_entries", [](const Inventory& self) { return self.entries.size(); })
      .def_property_readonly("num_boxes", &Inventory::num_boxes);
  py::class_<PlanOfInventory>(m, "SavePlan")
      .def(
          "assignment", [](PlanOfInventory& self, uint32_t rank) { return py::bytes(self.assignment(rank)); },
          py::arg("rank"))
      .def("summary", &PlanOfInventory::summary)
      .def("chunks", &PlanOfInventory::chunks)
      .def_property_readonly("rank_bytes", [](const PlanOfInventory& self) { return self.plan.rank_bytes; });
  m.def("plan_save", &plan_save, py::arg("inventory"), py::kw_only(), py::arg("dedup_to_lowest_rank") = false,
        py::arg("min_part_bytes") = planner::SaveOptions{}.min_part_bytes);
  m.def("apply_assignment", &apply_assignment, py::arg("inventory"), py::arg("assignment"));
}

}  // namespace bytecheckpoint::testing
