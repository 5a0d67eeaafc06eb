// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/standard_pickle.h"

#include <unordered_map>

#include "csrc/format/pickle/pickle_tree.h"
#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"

namespace bytecheckpoint::fuzz {
namespace {

using namespace format;  // NOLINT

/// Whether a pickle is a tree of only builtin values, by its own reader.
bool is_builtin(std::string_view bytes) {
  const auto encode = static_cast<uint32_t>(StandardGlobal::kEncode);
  const PickleRules rules{[&](std::string_view module, std::string_view name) {
                            return module == "_codecs" && name == "encode" ? std::make_optional(encode) : std::nullopt;
                          },
                          false};
  const auto pickle = read_pickle(bytes, rules);
  if (!pickle.is_ok()) return false;
  UnfoldBudget budget(pickle.value());
  return unfold_tree(pickle.value(), pickle.value().root(), &budget, {true, encode}).is_ok();
}

}  // namespace

/// The check ends soon for any graph, and accepts all pickles of builtin values.
std::string standard_pickle(std::string_view bytes) {
  PeakMemory memory(bytes.size());
  bool is_standard = false;
  {
    const auto pickle = read_pickle(bytes, standard_rules());
    std::unordered_map<uint32_t, PickledTensor> tensors;
    is_standard = pickle.is_ok() && check_standard(pickle.value(), &tensors).is_ok();
  }
  BCP_ALL_HOLD(memory.stop());
  BCP_HOLDS(is_standard || !is_builtin(bytes));
  return {};
}

}  // namespace bytecheckpoint::fuzz
