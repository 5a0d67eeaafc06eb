// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "csrc/bindings/bind.h"
#include "csrc/bridge/checkpoint.h"
#include "csrc/bridge/chosen_keys.h"
#include "csrc/bridge/copies_of_state.h"
#include "csrc/bridge/gaps.h"
#include "csrc/bridge/global_plan.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/bridge/write_plan.h"
#include "csrc/planner/compare_copies.h"
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

/// What ranks have sent: inventories, and beside them copies.
struct Messages {
  std::vector<std::string_view> inventories;
  std::vector<planner::EncodedCopies> copies;

  void add(std::string_view message, std::optional<uint32_t> rank) {
    const auto [inventory, of_rank] = planner::split_message(message);
    inventories.push_back(inventory);
    if (!of_rank.empty()) copies.push_back({of_rank, rank});
  }
};

/// \param below  Of the nodes below a node, which name their ranks.
Messages messages_below(const py::bytes& own, uint32_t rank, const Blobs& below) {
  Messages messages;
  for (const py::bytes& message : below) messages.add(std::string_view(message), std::nullopt);
  messages.add(std::string_view(own), rank);
  return messages;
}

/// Merges the inventories of a node and of those below it.
base::Result<planner::Inventory> merge_at_node(const Messages& messages, uint32_t rank) {
  const std::vector<std::string_view> below(messages.inventories.begin(), messages.inventories.end() - 1);
  return planner::merge_below(messages.inventories.back(), rank, below);
}

py::list differing_to_python(const std::vector<planner::DifferingCopies>& differing) {
  py::list out;
  for (const planner::DifferingCopies& of : differing) out.append(py::make_tuple(of.fqn, of.kind, of.ranks));
  return out;
}

/// Options of a plan, as Python names them.
struct PlanOptions {
  bool dedup_to_lowest_rank;
  bool is_nested;
  engine::Gaps gaps;
  std::vector<std::string> known_differing;
};

/// Returns (assignments, numbers of items, bytes, groups of copies that were found equal, each by rank; which copies
/// differ; what the metadata will say).
template <class Merge>
py::tuple plan_merged(const Messages& messages, const PlanOptions& options, const Merge& merge) {
  planner::SaveOptions save_options;
  save_options.dedup_to_lowest_rank = options.dedup_to_lowest_rank;
  planner::Comparison comparison;
  GlobalPlan plan = value_unlocked([&]() -> base::Result<GlobalPlan> {
    BCP_ASSIGN_OR_RETURN(planner::Inventory inventory, merge());
    BCP_ASSIGN_OR_RETURN(const planner::Copies copies, planner::merge_copies(messages.copies));
    BCP_ASSIGN_OR_RETURN(comparison, planner::compare_copies(copies, options.known_differing, &inventory));
    return plan_inventory(inventory, save_options, options.is_nested, options.gaps);
  });
  py::list assignments, groups;
  for (const std::string& assignment : plan.assignments) assignments.append(py::bytes(assignment));
  for (const std::string& of_rank : comparison.groups) groups.append(py::bytes(of_rank));
  return py::make_tuple(std::move(assignments), std::move(plan.rank_items), std::move(plan.rank_bytes),
                        std::move(groups), differing_to_python(comparison.differing),
                        CheckpointHolder(new Checkpoint(std::move(plan.manifest))));
}

/// Makes the plan of a save. \param messages  From LocalState::message of ranks 0, 1, ...
py::tuple plan_ranks(const Blobs& blobs, bool dedup_to_lowest_rank, bool is_nested, const std::string& gaps,
                     std::vector<std::string> known_differing) {
  Messages messages;
  for (const py::bytes& blob : blobs) {
    messages.add(std::string_view(blob), static_cast<uint32_t>(messages.inventories.size()));
  }
  return plan_merged(messages, {dedup_to_lowest_rank, is_nested, gaps_of(gaps), std::move(known_differing)},
                     [&] { return planner::merge_ranks(messages.inventories); });
}

/// The same at the root of a tree. \param below  What `merge_below` returned at the nodes right below the root.
py::tuple plan_tree(const py::bytes& own, uint32_t rank, const Blobs& below, bool dedup_to_lowest_rank, bool is_nested,
                    const std::string& gaps, std::vector<std::string> known_differing) {
  const Messages messages = messages_below(own, rank, below);
  return plan_merged(messages, {dedup_to_lowest_rank, is_nested, gaps_of(gaps), std::move(known_differing)},
                     [&] { return merge_at_node(messages, rank); });
}

/// Returns what a node of a tree hands up: the merged message of its rank and all ranks below it.
py::bytes merge_below(const py::bytes& own, uint32_t rank, const Blobs& below) {
  const Messages messages = messages_below(own, rank, below);
  return py::bytes(value_unlocked([&]() -> base::Result<std::string> {
    BCP_ASSIGN_OR_RETURN(const planner::Inventory inventory, merge_at_node(messages, rank));
    std::string copies;
    if (!messages.copies.empty()) {
      BCP_ASSIGN_OR_RETURN(const planner::Copies merged, planner::merge_copies(messages.copies));
      copies = planner::encode_copies(merged);
    }
    return planner::join_message(planner::encode_inventory(inventory), copies);
  }));
}

/// Does for a message of one rank what `CopiesOfState::hashes_of_groups` does. \returns None if it has no such groups.
py::object hashes_of_groups(const py::bytes& message, const py::bytes& groups) {
  const std::string_view encoded = planner::split_message(std::string_view(message)).second;
  const planner::Copies copies =
      encoded.empty() ? planner::Copies() : value_or_raise(planner::decode_copies({encoded, uint32_t{0}}));
  std::vector<planner::HeldCopy> of_rank;
  of_rank.reserve(copies.variants.size());
  for (const planner::Copies::Variant& variant : copies.variants) of_rank.push_back(variant.copy);
  const auto hashes = planner::hashes_of_groups(of_rank, std::string_view(groups));
  return hashes.is_ok() ? py::object(py::bytes(hashes.value())) : py::none();
}

/// Returns the items of another rank's plan. \param assignment  What that rank is to write; None for all that it holds.
py::list items_of_blob(const py::bytes& blob, const py::object& assignment, const py::object& part_class) {
  auto state = std::make_shared<LocalState>(
      value_or_raise(planner::decode_inventory(planner::split_message(std::string_view(blob)).first)));
  if (assignment.is_none()) return state->items();
  auto planned =
      value_or_raise(planner::apply_assignment(state->inventory(), std::string_view(assignment.cast<py::bytes>())));
  Writes writes = value_or_raise(writes_of(*state, std::move(planned)));
  return WritePlan(std::move(state), std::move(writes), part_class).items();
}

void bind_copies(py::module_& m) {
  py::class_<CopiesOfState>(m, "CopiesOfState", py::module_local())
      .def(py::init([](const LocalState& state, bool compares, uint64_t seed, py::object mesh_of, py::object shards_of,
                       py::object checksum_of) {
             const CopyQuestions questions{std::move(mesh_of), std::move(shards_of), std::move(checksum_of)};
             return std::make_unique<CopiesOfState>(state, questions, compares, seed);
           }),
           py::arg("state"), py::kw_only(), py::arg("compares"), py::arg("seed"), py::arg("mesh_of"),
           py::arg("shards_of"), py::arg("checksum_of"))
      .def(
          "message",
          [](const CopiesOfState& copies, const py::bytes& inventory) {
            const std::string_view bytes(inventory);
            return py::bytes(unlocked([&] { return copies.message(bytes); }));
          },
          py::arg("inventory"))
      .def(
          "hashes_of_groups",
          [](const CopiesOfState& copies, const py::bytes& groups) -> py::object {
            const auto hashes = copies.hashes_of_groups(std::string_view(groups));
            return hashes.is_ok() ? py::object(py::bytes(hashes.value())) : py::none();
          },
          py::arg("groups"))
      .def_property_readonly("meshes", [](const CopiesOfState& copies) { return py::bytes(copies.meshes()); })
      .def_property_readonly("has_checksums", &CopiesOfState::has_checksums);
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
  m.def("with_kept", &with_kept, py::arg("state"), py::arg("flat"), py::arg("kept"), py::arg("stand_in"));
  py::class_<LocalState, std::shared_ptr<LocalState>>(m, "LocalState", py::module_local())
      .def(py::init<const py::dict&, const py::object&, const py::object&, const py::object&, bool>(), py::arg("flat"),
           py::arg("mappings"), py::arg("chunks_of"), py::arg("items_of"), py::kw_only(), py::arg("can_split"))
      .def_property_readonly("blob",
                             [](const LocalState& state) { return py::bytes(unlocked([&] { return state.blob(); })); })
      .def_property_readonly("num_items", [](const LocalState& state) { return state.inventory().num_boxes(); })
      .def_property_readonly("num_bytes", &LocalState::num_bytes)
      .def("items", &LocalState::items);
  bind_copies(m);
  m.def("plan_ranks", &plan_ranks, py::arg("blobs"), py::kw_only(), py::arg("dedup_to_lowest_rank"),
        py::arg("is_nested"), py::arg("gaps") = "refuse", py::arg("known_differing") = std::vector<std::string>());
  m.def("plan_tree", &plan_tree, py::arg("own"), py::arg("rank"), py::arg("below"), py::kw_only(),
        py::arg("dedup_to_lowest_rank"), py::arg("is_nested"), py::arg("gaps") = "refuse",
        py::arg("known_differing") = std::vector<std::string>());
  m.def("merge_below", &merge_below, py::arg("own"), py::arg("rank"), py::arg("below"));
  m.def("hashes_of_groups", &hashes_of_groups, py::arg("message"), py::arg("groups"));
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
