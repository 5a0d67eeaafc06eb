// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/pickle/pickle_copy.h"
#include "csrc/format/torch/pickled_tensor.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::format {

/// One value of a state dict that torch.save wrote.
struct TorchValue {
  std::string fqn;
  std::string path;  // the tuple of keys and positions that lead there, as the bytes of a Tree
  PickleValue value;
  std::optional<PickledTensor> tensor;  // if it is a plain one, or the part of a DTensor that a rank had
  std::optional<tensor::Box> box;       // of that part
  tensor::Dims global_sizes;            // of the DTensor
  std::string refusal;                  // why neither a tensor nor an object can be made of it; empty otherwise
};

/// Limits the memory for all that is made of one pickle, because a small pickle can share one dict among many places.
/// An entry of four bytes, the least that one takes, becomes an item of about 500.
class TorchBudget {
 public:
  explicit TorchBudget(size_t pickle_bytes) : left_(kTimes * pickle_bytes + kFreeBytes) {}

  size_t left() const { return left_; }
  /// Counts `bytes` as used. \returns kCorrupt if that is more than is left.
  base::Status take(size_t bytes);

 private:
  static constexpr size_t kTimes = 256, kFreeBytes = 1 << 20;
  size_t left_;
};

/// Names the values in nested dicts and lists, in their order, as DCP's `flatten_state_dict` does: every dict is
/// entered; a list only if it holds a tensor or a dict, in it or in lists below it. Objects that were filled as dicts,
/// such as an OrderedDict, count as dicts.
///
/// \param pickle  Read with the rules of `names`. Its root must be a dict, unless there is a `root`.
/// \param root    Name of the root, below which all others then stand; empty for a root without one.
/// \returns kUnsupported for a root that is no dict and has no name; kCorrupt for dicts nested deeper than
/// kMaxTreeDepth and for what is beyond the budget.
base::Result<std::vector<TorchValue>> flatten_torch_value(const Pickle& pickle, const GlobalNames& names,
                                                          TorchBudget* budget, std::string_view root = {});

}  // namespace bytecheckpoint::format
