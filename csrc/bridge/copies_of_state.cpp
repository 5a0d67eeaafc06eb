// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/copies_of_state.h"

#include <algorithm>
#include <map>
#include <optional>

#include "csrc/base/bytes.h"
#include "csrc/base/crc32.h"
#include "csrc/base/index_table.h"
#include "csrc/bridge/gil_yield.h"
#include "csrc/bridge/python_calls.h"
#include "csrc/bridge/tree_caster.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/format/torch/builtin_archive.h"
#include "csrc/staging/checksum_sample.h"

namespace bytecheckpoint::bridge {
namespace {

namespace py = pybind11;
using planner::EntryKind;
using planner::HeldCopy;

/// All ranks of the process group are in this mesh: there is no other one to compare with.
constexpr uint32_t kMeshOfAll = 1;

/// Host memory whose checksum is to be computed.
struct Memory {
  size_t copy;
  tensor::StridedView view;
};

/// Collects the copies of a state, and the memory of which the checksums are still missing.
class CopyScan {
 public:
  CopyScan(const LocalState& state, const CopyQuestions& questions, bool compares)
      : state_(state), questions_(questions), compares_(compares) {}

  std::vector<HeldCopy> copies;
  std::vector<Memory> memories;

  void run() {
    GilYield gil_yield;
    for (uint32_t e = 0; e < state_.inventory().entries.size(); ++e) {
      gil_yield.take();
      scan(state_.inventory().entries[e], state_.value_of(e));
    }
  }

 private:
  void scan(const planner::Entry& entry, const StateValue& value) {
    const bool is_sharded = entry.kind == EntryKind::kShard;
    if (!is_sharded && !compares_) return;
    const uint32_t mesh = is_sharded ? mesh_of(value) : 0;
    if (mesh == kMeshOfAll) return;
    const py::object shards = compares_ && is_sharded && value.kind == StateValue::Kind::kOther
                                  ? call_python(questions_.shards_of, value.value)
                                  : py::none();
    for (uint32_t b = 0; b < entry.num_boxes; ++b) {
      planner::BoxArray box;
      const int64_t* numbers = state_.inventory().box_dims(entry, b, &box);
      HeldCopy& copy = copies.emplace_back();
      copy.key = planner::key_of_copy(state_.inventory().fqn(entry), numbers, entry.num_dims);
      copy.mesh = mesh;
      if (compares_) look_at(entry, value, b, shards);
    }
  }

  uint32_t mesh_of(const StateValue& value) {
    if (value.kind != StateValue::Kind::kDTensor) return call_python(questions_.mesh_of, value.value).cast<uint32_t>();
    PyObject* const mesh = attribute(value.value, py::str("device_mesh")).ptr();  // the tensor keeps it
    const auto [known, is_new] = meshes_.try_emplace(mesh, 0);
    if (is_new) known->second = call_python(questions_.mesh_of, value.value).cast<uint32_t>();
    return known->second;
  }

  /// Gives the last copy its checksum, or notes the memory for it.
  void look_at(const planner::Entry& entry, const StateValue& value, uint32_t number, const py::object& shards) {
    if (value.kind == StateValue::Kind::kObject) {
      checksum_object(value.value);
      return;
    }
    if (entry.kind != EntryKind::kShard) {
      checksum_tensor(value.value);
      return;
    }
    const tensor::Box box = state_.inventory().box(entry, number);
    const auto found = std::find(value.boxes.begin(), value.boxes.end(), box);
    const auto position = static_cast<size_t>(found - value.boxes.begin());
    if (value.kind != StateValue::Kind::kOther) {
      checksum_tensor(value.local(position));
    } else if (py::len(shards) == value.boxes.size()) {
      checksum_tensor(shards[py::int_(position)]);
    }
  }

  void checksum_tensor(const py::object& tensor) {
    if (is_plain_tensor(tensor.ptr())) {
      const auto view = view_of_tensor(tensor.ptr(), false);
      const bool is_direct =
          view.is_ok() && std::all_of(view.value().strides_bytes.begin(), view.value().strides_bytes.end(),
                                      [](int64_t stride) { return stride >= 0; });
      if (is_direct) memories.push_back({copies.size() - 1, view.value()});
      if (view.is_ok() || cuda_device_of(tensor.ptr()).has_value()) return;
    }
    ask_checksum(tensor);
  }

  void checksum_object(const py::object& object) {
    const auto tree = try_tree_from_python(object, format::kMaxBuiltinPickleBytes);
    if (!tree.has_value()) {
      ask_checksum(object);
      return;
    }
    const std::string_view bytes = tree->bytes();
    copies.back().how = HeldCopy::kWhole;
    copies.back().checksum = base::crc32(0, bytes.data(), bytes.size());
  }

  void ask_checksum(const py::object& value) {
    const py::object checksum = call_python(questions_.checksum_of, value);
    if (checksum.is_none()) return;
    copies.back().how = HeldCopy::kWhole;
    copies.back().checksum = checksum.cast<uint32_t>();
  }

  const LocalState& state_;
  const CopyQuestions& questions_;
  const bool compares_;
  std::map<PyObject*, uint32_t> meshes_;
};

}  // namespace

CopiesOfState::CopiesOfState(const LocalState& state, const CopyQuestions& questions, bool compares, uint64_t seed) {
  CopyScan scan(state, questions, compares);
  scan.run();
  unlocked([&] {
    const auto how_of_block = HeldCopy::kWhole + 1 + static_cast<uint32_t>(seed % (UINT32_MAX - 1));
    for (const Memory& memory : scan.memories) {
      HeldCopy& copy = scan.copies[memory.copy];
      const staging::ChecksumSample sample = staging::sample_checksum(memory.view, base::spread_hash(copy.key ^ seed));
      copy.how = sample.is_whole ? HeldCopy::kWhole : how_of_block;
      copy.checksum = sample.crc;
    }
    planner::sort_copies(&scan.copies);
  });
  copies_ = std::move(scan.copies);
}

std::string CopiesOfState::message(std::string_view inventory) const {
  return planner::join_message(inventory, copies_.empty() ? std::string() : planner::encode_copies(copies_));
}

std::string CopiesOfState::meshes() const {
  base::ByteWriter out;
  for (const HeldCopy& copy : copies_) {
    if (copy.mesh == 0) continue;
    out.u64(copy.key);
    out.u32(copy.mesh);
  }
  return out.take();
}

bool CopiesOfState::has_checksums() const {
  return std::any_of(copies_.begin(), copies_.end(),
                     [](const HeldCopy& copy) { return copy.how != HeldCopy::kNothing; });
}

}  // namespace bytecheckpoint::bridge
