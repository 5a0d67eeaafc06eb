// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "csrc/format/pickle/pickle_copy.h"
#include "csrc/format/pickle/pickle_values.h"
#include "csrc/tensor/dims.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::format {

/// What a pickle of torch.save says of a plain tensor or Parameter. The elements are in another entry of the archive.
struct PickledTensor {
  const tensor::DTypeInfo* dtype = nullptr;  // plain
  std::string_view storage_key;
  std::string_view location;     // device of the storage when it was saved: `cpu`, `cuda:0`
  int64_t storage_elements = 0;  // in elements of its type; in bytes if untyped
  bool is_typed = false;
  int64_t first_element = 0;
  tensor::Dims sizes;
  tensor::Dims strides;
  bool is_conj = false;
  bool is_neg = false;
  bool requires_grad = false;
  bool is_parameter = false;
};

/// Recognises a plain tensor. Does not check its numbers: whether there is such a storage and whether the tensor lies
/// in it is for the caller to check (`locate_tensor`).
///
/// \param pickle  Its globals have the numbers of `find_standard_global`.
/// \returns nullopt for any other value.
std::optional<PickledTensor> read_pickled_tensor(const Pickle& pickle, const PickleValue& value);

/// The same, also for a plain tensor that somebody has given attributes, as DeepSpeed does. These are not read.
/// \param names  The pickle was read with their rules.
std::optional<PickledTensor> read_pickled_tensor(const Pickle& pickle, const GlobalNames& names,
                                                 const PickleValue& value);

}  // namespace bytecheckpoint::format
