// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle/pickle_tree.h"

#include "csrc/format/pickle/pickle_writer.h"
#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"

namespace bytecheckpoint::fuzz {
namespace {

using namespace format;  // NOLINT

base::Result<Tree> tree_of(std::string_view bytes, bool refuse_shared) {
  const PickleRules rules{[](std::string_view module, std::string_view name) {
                            return module == "_codecs" && name == "encode" ? std::make_optional(1u) : std::nullopt;
                          },
                          false};
  BCP_ASSIGN_OR_RETURN(const Pickle pickle, read_pickle(bytes, rules));
  UnfoldBudget budget(pickle);
  return unfold_tree(pickle, pickle.root(), &budget, {refuse_shared, 1u});
}

}  // namespace

/// A value that was read survives our writer and reader, in either protocol.
std::string pickle_tree(std::string_view bytes) {
  PeakMemory memory(bytes.size());
  const auto shared = tree_of(bytes, false);
  BCP_ALL_HOLD(memory.stop());
  const auto unshared = tree_of(bytes, true);
  BCP_HOLDS(shared.is_ok() || !unshared.is_ok());
  if (!unshared.is_ok()) return {};
  BCP_HOLDS(unshared.value() == shared.value());
  for (const int protocol : {2, 4}) {
    PickleWriter writer(protocol);
    writer.tree(unshared.value());
    const auto again = tree_of(writer.finish(), false);
    BCP_HOLDS(again.is_ok() && again.value() == unshared.value());
  }
  return {};
}

}  // namespace bytecheckpoint::fuzz
