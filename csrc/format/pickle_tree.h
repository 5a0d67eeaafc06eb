// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "csrc/base/status.h"
#include "csrc/format/pickle_reader.h"
#include "csrc/format/tree.h"

namespace bytecheckpoint::format {

/// How much memory may be taken for what is made of the values of one pickle.
///
/// A memo reference of two bytes can stand for a list of a thousand references to a list of a thousand references, or
/// for a text of a megabyte. With the values themselves, it all takes at most 15 times the pickle and 32 KiB. What a
/// pickler writes without such sharing always fits as a Tree: whatever value takes the most, it is 14.5 times. DCP's
/// metadata, whose names are shared, take some 6 times.
class UnfoldBudget {
 public:
  explicit UnfoldBudget(const Pickle& pickle);

  /// kCorrupt once more has been taken than there is. Steps that take no memory are bounded by taking what they look
  /// at.
  base::Status take(size_t bytes);

 private:
  size_t left_;
};

struct UnfoldRules {
  /// Refuses a list or dict that stands in several places: there would be a copy in each.
  bool refuse_shared = false;
  /// The caller's number for `_codecs.encode`, by which protocol 2 writes bytes; without it they are an object.
  std::optional<uint32_t> encode;
};

/// Copies a value of builtin types. Of equal keys of a dict all are kept, in order.
///
/// \returns kCorrupt beyond a depth of kMaxTreeDepth (so also for what holds itself), beyond the budget, or for a key
///   that cannot be hashed; kUnsupported for a global or object, or what the rules refuse.
base::Result<Tree> unfold_tree(const Pickle& pickle, const PickleValue& value, UnfoldBudget* budget,
                               const UnfoldRules& rules = {});

}  // namespace bytecheckpoint::format
