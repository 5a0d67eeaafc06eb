// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "csrc/base/status.h"

namespace bytecheckpoint::fuzz {

/// A property that a parser guarantees for any bytes. \returns what does not hold, or an empty text.
using Property = std::string (*)(std::string_view bytes);

/// Changes a part in any way, to at most `max_bytes`. A Mutation uses it to make other bytes that a parser may accept,
/// so that they reach the code behind checksums and lengths.
struct Change {
  virtual ~Change() = default;
  virtual std::string operator()(std::string_view part, size_t max_bytes) = 0;
  virtual size_t below(size_t limit) = 0;
};
using Mutation = std::string (*)(std::string_view bytes, size_t max_bytes, Change* change);

#define BCP_HOLDS(condition) \
  if (!(condition)) return ::bytecheckpoint::base::text(__FILE__, ":", __LINE__, ": ", #condition)
/// Returns the fault of a part of a property.
#define BCP_ALL_HOLD(property) \
  if (std::string fault = (property); !fault.empty()) return fault

}  // namespace bytecheckpoint::fuzz
