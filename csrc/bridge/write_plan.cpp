// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/write_plan.h"

#include "csrc/bridge/drop.h"
#include "csrc/bridge/errors.h"
#include "csrc/bridge/unlocked.h"

namespace bytecheckpoint::bridge {
namespace {

namespace py = pybind11;
using base::text;

base::Result<int64_t> planned_bytes(const WriteItemFields& write) {
  int64_t bytes = 0;
  if (!tensor::checked_numel(write.box.sizes, &bytes) ||
      !base::checked_mul(bytes, write.dtype->itemsize_bytes, &bytes)) {
    return base::Status::make(base::Code::kInvalidArgument,
                              text("'", write.fqn, "': impossible shape ", tensor::to_text(write.box.sizes)));
  }
  return bytes;
}

}  // namespace

base::Status Writes::add(Write write) {
  if (!write.planned.is_tensor) {
    objects.push_back(std::move(write));
    return base::Status::ok();
  }
  BCP_ASSIGN_OR_RETURN(write.bytes, planned_bytes(write.planned));
  num_bytes += write.bytes;
  tensors.push_back(std::move(write));
  return base::Status::ok();
}

base::Result<Writes> writes_of(const LocalState& state, std::vector<planner::PlannedWrite> planned) {
  Writes writes;
  const planner::Inventory& inventory = state.inventory();
  for (planner::PlannedWrite& assigned : planned) {
    const planner::Entry& entry = inventory.entries[assigned.entry];
    Write write;
    write.planned.fqn = inventory.fqn(entry);
    write.planned.is_tensor = entry.is_tensor();
    if (entry.is_tensor()) write.planned.dtype = tensor::find_dtype(entry.dtype);
    write.planned.box = std::move(assigned.box);
    write.entry = assigned.entry;
    write.box = assigned.number;
    BCP_RETURN_IF_ERROR(writes.add(std::move(write)));
  }
  return writes;
}

WritePlan::WritePlan(const py::iterable& items) {
  for (const py::handle item : items) {
    Write write;
    write.planned = read_write_item(item);
    write.item = py::reinterpret_borrow<py::object>(item);
    raise_if_error(writes_.add(std::move(write)));
  }
}

WritePlan::~WritePlan() {
  if (state_ != nullptr) {
    unlocked([&] { writes_ = Writes(); });
  } else {
    drop_in_breaths(&writes_.tensors);
    drop_in_breaths(&writes_.objects);
  }
}

const Write& WritePlan::tensor_at(size_t position) const {
  if (position >= tensors().size()) throw py::index_error("no such tensor in the plan");
  return tensors()[position];
}

const Write& WritePlan::object_at(size_t position) const {
  if (position >= objects().size()) throw py::index_error("no such object in the plan");
  return objects()[position];
}

py::object WritePlan::item_of(const Write& write) const {
  return write.item ? write.item : state_->item(write.entry, write.box, write.planned.box, part_class_);
}

py::list WritePlan::items() const {
  py::list all;
  size_t object = 0;
  for (const Write& tensor : tensors()) {
    while (object < objects().size() && objects()[object].entry < tensor.entry)
      all.append(item_of(objects()[object++]));
    all.append(item_of(tensor));
  }
  while (object < objects().size()) all.append(item_of(objects()[object++]));
  return all;
}

std::vector<std::pair<size_t, size_t>> WritePlan::batches(int64_t limit_bytes) const {
  std::vector<std::pair<size_t, size_t>> ranges;
  int64_t bytes = 0;
  size_t begin = 0;
  for (size_t i = 0; i < tensors().size(); ++i) {
    bytes += tensors()[i].bytes;
    if (bytes < limit_bytes && i + 1 < tensors().size()) continue;
    ranges.emplace_back(begin, i + 1);
    begin = i + 1;
    bytes = 0;
  }
  return ranges;
}

}  // namespace bytecheckpoint::bridge
