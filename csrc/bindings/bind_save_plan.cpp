// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include "csrc/bindings/bind_engine.h"
#include "csrc/bridge/checkpoint.h"
#include "csrc/bridge/chosen_keys.h"
#include "csrc/bridge/gaps.h"
#include "csrc/bridge/global_plan.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/bridge/write_plan.h"
#include "csrc/planner/inventory_blob.h"
#include "csrc/planner/merge_inventories.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

std::unique_ptr<WritePlan> plan_assignment(std::shared_ptr<LocalState> state, const py::bytes& assignment,
                                           py::object part_class) {
  const std::string_view encoded(assignment);
  Writes writes = value_unlocked([&, &local_state = std::as_const(*state)]() -> base::Result<Writes> {
    BCP_ASSIGN_OR_RETURN(auto planned, planner::apply_assignment(local_state.inventory(), encoded));
    return writes_of(local_state, std::move(planned));
  });
  return std::make_unique<WritePlan>(std::move(state), std::move(writes), std::move(part_class));
}

using Blobs = std::vector<py::bytes>;

std::vector<std::string_view> views_of(const Blobs& blobs) {
  return {blobs.begin(), blobs.end()};
}

/// Returns (assignments, numbers of items, bytes, each by rank; what the metadata will say).
template <class Merge>
py::tuple plan_merged(bool dedup_to_lowest_rank, bool is_nested, engine::Gaps gaps, const Merge& merge) {
  planner::SaveOptions options;
  options.dedup_to_lowest_rank = dedup_to_lowest_rank;
  GlobalPlan plan = value_unlocked([&]() -> base::Result<GlobalPlan> {
    BCP_ASSIGN_OR_RETURN(const planner::Inventory inventory, merge());
    return plan_inventory(inventory, options, is_nested, gaps);
  });
  py::list assignments;
  for (const std::string& assignment : plan.assignments) assignments.append(py::bytes(assignment));
  return py::make_tuple(std::move(assignments), std::move(plan.rank_items), std::move(plan.rank_bytes),
                        CheckpointHolder(new Checkpoint(std::move(plan.manifest))));
}

/// Makes the plan of a save. \param blobs  From LocalState::blob of ranks 0, 1, ...
py::tuple plan_ranks(const Blobs& blobs, bool dedup_to_lowest_rank, bool is_nested, const std::string& gaps) {
  const std::vector<std::string_view> views = views_of(blobs);
  return plan_merged(dedup_to_lowest_rank, is_nested, gaps_of(gaps), [&] { return planner::merge_ranks(views); });
}

/// The same at the root of a tree. \param below  What `merge_below` returned at the nodes right below the root.
py::tuple plan_tree(const py::bytes& own, uint32_t rank, const Blobs& below, bool dedup_to_lowest_rank, bool is_nested,
                    const std::string& gaps) {
  const std::vector<std::string_view> views = views_of(below);
  return plan_merged(dedup_to_lowest_rank, is_nested, gaps_of(gaps),
                     [&, own = std::string_view(own)] { return planner::merge_below(own, rank, views); });
}

/// Returns what a node of a tree hands up: the merged inventory of its rank and all ranks below it.
py::bytes merge_below(const py::bytes& own, uint32_t rank, const Blobs& below) {
  const std::vector<std::string_view> views = views_of(below);
  return py::bytes(value_unlocked([&, own = std::string_view(own)]() -> base::Result<std::string> {
    BCP_ASSIGN_OR_RETURN(const planner::Inventory inventory, planner::merge_below(own, rank, views));
    return planner::encode_inventory(inventory);
  }));
}

/// Returns the items of another rank's plan. \param assignment  What that rank is to write; None for all that it holds.
py::list items_of_blob(const py::bytes& blob, const py::object& assignment, const py::object& part_class) {
  auto state = std::make_shared<LocalState>(value_or_raise(planner::decode_inventory(std::string_view(blob))));
  if (assignment.is_none()) return state->items();
  auto planned =
      value_or_raise(planner::apply_assignment(state->inventory(), std::string_view(assignment.cast<py::bytes>())));
  Writes writes = value_or_raise(writes_of(*state, std::move(planned)));
  return WritePlan(std::move(state), std::move(writes), part_class).items();
}

}  // namespace

void bind_save_plan(py::module_& m) {
  m.def(
      "choose_keys",
      [](const py::dict& flat, const py::object& mappings, const py::list& include, const py::list& exclude) {
        ChosenKeys chosen = choose_keys(flat, mappings, include, exclude);
        return py::make_tuple(std::move(chosen.kept.values), std::move(chosen.kept.mappings), chosen.is_used);
      },
      py::arg("flat"), py::arg("mappings"), py::arg("include"), py::arg("exclude"));
  m.def("without_others", &without_others, py::arg("state"), py::arg("flat"), py::arg("kept"), py::arg("stand_in"));
  py::class_<LocalState, std::shared_ptr<LocalState>>(m, "LocalState", py::module_local())
      .def(py::init<const py::dict&, const py::object&, const py::object&, const py::object&, bool>(), py::arg("flat"),
           py::arg("mappings"), py::arg("chunks_of"), py::arg("items_of"), py::kw_only(), py::arg("can_split"))
      .def_property_readonly("blob",
                             [](const LocalState& state) { return py::bytes(unlocked([&] { return state.blob(); })); })
      .def_property_readonly("num_items", [](const LocalState& state) { return state.inventory().num_boxes(); })
      .def_property_readonly("num_bytes", &LocalState::num_bytes)
      .def("items", &LocalState::items);
  m.def("plan_ranks", &plan_ranks, py::arg("blobs"), py::kw_only(), py::arg("dedup_to_lowest_rank"),
        py::arg("is_nested"), py::arg("gaps") = "refuse");
  m.def("plan_tree", &plan_tree, py::arg("own"), py::arg("rank"), py::arg("below"), py::kw_only(),
        py::arg("dedup_to_lowest_rank"), py::arg("is_nested"), py::arg("gaps") = "refuse");
  m.def("merge_below", &merge_below, py::arg("own"), py::arg("rank"), py::arg("below"));
  m.def("items_of_blob", &items_of_blob, py::arg("blob"), py::arg("assignment"), py::arg("part_class"));
  py::class_<WritePlan>(m, "WritePlan", py::module_local())
      .def(py::init<const py::iterable&>(), py::arg("items"))
      .def_static("of_assignment", &plan_assignment, py::arg("state"), py::arg("assignment"), py::arg("part_class"))
      .def_property_readonly("is_of_state", [](const WritePlan& plan) { return plan.state() != nullptr; })
      .def_property_readonly("num_items", &WritePlan::num_items)
      .def_property_readonly("num_tensors", [](const WritePlan& plan) { return plan.tensors().size(); })
      .def_property_readonly("num_objects", [](const WritePlan& plan) { return plan.objects().size(); })
      .def_property_readonly("num_bytes", &WritePlan::num_bytes)
      .def("tensor_item", &WritePlan::tensor_item, py::arg("position"))
      .def("object_item", &WritePlan::object_item, py::arg("position"))
      .def(
          "object_fqn", [](const WritePlan& plan, size_t position) { return plan.object_at(position).planned.fqn; },
          py::arg("position"))
      .def("items", &WritePlan::items)
      .def("batches", &WritePlan::batches, py::arg("limit_bytes"));
}

}  // namespace bytecheckpoint::bindings
