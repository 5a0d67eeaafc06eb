// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "csrc/base/status.h"
#include "csrc/format/pickle_reader.h"
#include "csrc/format/tree.h"

namespace bytecheckpoint::format {

/// How much may be made of the values of one pickle.
///
/// A memo reference of two bytes can stand for a list of a thousand references to a list of a thousand references, or
/// for a text of a megabyte. What a pickler writes without such sharing always fits: every value and every number took
/// at least one byte. Names are shared by honest pickles too, hence a factor for text.
class UnfoldBudget {
 public:
  explicit UnfoldBudget(size_t pickle_bytes);

  /// kCorrupt once more values have been taken than the pickle has bytes.
  base::Status take_values(size_t count);
  /// kCorrupt once more text has been taken than many times the pickle.
  base::Status take_text(size_t bytes);

 private:
  size_t values_left_;
  size_t text_left_;
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
