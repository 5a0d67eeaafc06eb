// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "csrc/base/status.h"
#include "csrc/format/pickle/pickle_reader.h"
#include "csrc/format/tree.h"

namespace bytecheckpoint::format {

/// Limits the memory for everything that is made of the values of one pickle.
///
/// This is needed because a memo reference of two bytes can stand for a list of a thousand references to a list of a
/// thousand references, or for a megabyte of text. The limit, values included, is 15 times the size of the pickle and
/// 32 KiB. A pickle that shares nothing always fits when it becomes a Tree: the costliest value takes 14.5 times its
/// size. DCP's metadata, whose names are shared, take about 6 times.
class UnfoldBudget {
 public:
  explicit UnfoldBudget(const Pickle& pickle);

  /// Counts `bytes` as used. \returns kCorrupt if that is more than is left. A loop that takes no memory is bounded,
  /// too: it takes what it looks at.
  base::Status take(size_t bytes);

 private:
  size_t left_;
};

/// How `unfold_tree` treats special values.
struct UnfoldRules {
  /// Refuse a list or dict that stands in several places, because the tree would have a copy in each place.
  bool refuse_shared = false;
  /// The caller's number for `_codecs.encode`, by which protocol 2 writes bytes. Without it such bytes count as an
  /// object.
  std::optional<uint32_t> encode;
};

/// Copies a value of builtin types into a Tree. If a dict has equal keys, all are kept, in order.
///
/// \returns kCorrupt for a value nested deeper than kMaxTreeDepth (so also for one that holds itself), one beyond the
/// budget, or a key that cannot be hashed; kUnsupported for a global, an object, or what the rules refuse.
base::Result<Tree> unfold_tree(const Pickle& pickle, const PickleValue& value, UnfoldBudget* budget,
                               const UnfoldRules& rules = {});

}  // namespace bytecheckpoint::format
