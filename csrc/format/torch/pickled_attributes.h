// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "csrc/format/pickle/pickle_values.h"
#include "csrc/tensor/dims.h"

namespace bytecheckpoint::format {

/// Returns an attribute of an object as the pickle describes it, or an entry of a dict; a hole if there is none, or if
/// there are more than 64 of them.
PickleValue attribute_of(const Pickle& pickle, const PickleValue& value, std::string_view name);

/// Reads ints in a tuple, a list or a torch.Size. \param pickle  Its globals have the numbers of
/// `find_standard_global`.
/// \returns false for anything else, and for more than kMaxDims.
bool read_pickled_ints(const Pickle& pickle, const PickleValue& value, tensor::Dims* out);
/// The same for one int.
bool read_pickled_int(const Pickle& pickle, const PickleValue& value, int64_t* out);

}  // namespace bytecheckpoint::format
