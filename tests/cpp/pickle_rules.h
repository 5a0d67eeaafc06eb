// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string_view>

#include "csrc/format/pickle/pickle_tree.h"

/// Small rules for reading pickles, for tests of the machine itself.
namespace bytecheckpoint::test {

using format::Pickle;
using format::PickleRules;
using format::Tree;
using format::UnfoldBudget;

/// Allows `m.C` as 1 and `m.f` as 2.
inline const PickleRules kRules{[](std::string_view module, std::string_view name) -> std::optional<uint32_t> {
                                  if (module == "m" && name == "C") return 1;
                                  if (module == "m" && name == "f") return 2;
                                  return std::nullopt;
                                },
                                false};

inline base::Result<Pickle> read(std::string_view bytes) {
  return read_pickle(bytes, kRules);
}

/// The tree of a pickle of builtin values.
inline base::Result<Tree> tree_of(std::string_view bytes) {
  BCP_ASSIGN_OR_RETURN(const Pickle pickle, read(bytes));
  UnfoldBudget budget(pickle);
  return unfold_tree(pickle, pickle.root(), &budget);
}

}  // namespace bytecheckpoint::test
