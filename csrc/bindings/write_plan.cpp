// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/write_plan.h"

#include "csrc/bindings/breath.h"
#include "csrc/bindings/errors.h"
#include "csrc/planner/save_answer.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using base::text;

int64_t planned_bytes(const PlannedWrite& write) {
  int64_t bytes = 0;
  if (!tensor::checked_numel(write.box.sizes, &bytes) ||
      !base::checked_mul(bytes, write.dtype->itemsize_bytes, &bytes)) {
    raise(base::Status::make(base::Code::kInvalidArgument,
                             text("'", write.fqn, "': impossible shape ", tensor::to_text(write.box.sizes))));
  }
  return bytes;
}

}  // namespace

WritePlan::WritePlan(const py::iterable& items) {
  for (const py::handle item : items) {
    Write write;
    write.planned = read_write_item(item);
    write.item = py::reinterpret_borrow<py::object>(item);
    add(std::move(write));
  }
}

WritePlan::WritePlan(std::shared_ptr<const LocalState> state, std::vector<planner::PlannedWrite> planned,
                     py::object part_class)
    : state_(std::move(state)), part_class_(std::move(part_class)) {
  const planner::Inventory& inventory = state_->inventory();
  Breath breath;
  for (planner::PlannedWrite& told : planned) {
    breath.take();
    const planner::Entry& entry = inventory.entries[told.entry];
    Write write;
    write.planned.fqn = inventory.fqn(entry);
    write.planned.is_tensor = entry.is_tensor();
    if (entry.is_tensor()) write.planned.dtype = tensor::find_dtype(entry.dtype);
    write.planned.box = std::move(told.box);
    write.entry = told.entry;
    write.box = told.number;
    add(std::move(write));
  }
}

void WritePlan::add(Write write) {
  if (!write.planned.is_tensor) {
    objects_.push_back(std::move(write));
    return;
  }
  write.bytes = planned_bytes(write.planned);
  num_bytes_ += write.bytes;
  tensors_.push_back(std::move(write));
}

const Write& WritePlan::tensor_at(size_t position) const {
  if (position >= tensors_.size()) throw py::index_error("no such tensor in the plan");
  return tensors_[position];
}

const Write& WritePlan::object_at(size_t position) const {
  if (position >= objects_.size()) throw py::index_error("no such object in the plan");
  return objects_[position];
}

py::object WritePlan::item_of(const Write& write) const {
  return write.item ? write.item : state_->item(write.entry, write.box, write.planned.box, part_class_);
}

py::list WritePlan::items() const {
  py::list all;
  size_t object = 0;
  for (const Write& tensor : tensors_) {
    while (object < objects_.size() && objects_[object].entry < tensor.entry) all.append(item_of(objects_[object++]));
    all.append(item_of(tensor));
  }
  while (object < objects_.size()) all.append(item_of(objects_[object++]));
  return all;
}

std::vector<std::pair<size_t, size_t>> WritePlan::batches(int64_t limit_bytes) const {
  std::vector<std::pair<size_t, size_t>> ranges;
  int64_t bytes = 0;
  size_t begin = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    bytes += tensors_[i].bytes;
    if (bytes < limit_bytes && i + 1 < tensors_.size()) continue;
    ranges.emplace_back(begin, i + 1);
    begin = i + 1;
    bytes = 0;
  }
  return ranges;
}

}  // namespace bytecheckpoint::bindings
