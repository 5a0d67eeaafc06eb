// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "csrc/format/pickle/pickle_copy.h"
#include "csrc/format/torch/pickled_tensor.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::format {

/// What a pickle of torch.save says of a DTensor: the part that one rank had of it.
struct PickledDTensor {
  PickledTensor local;
  tensor::Dims global_sizes;
  tensor::Box box;  // of the local part
};

/// Whether a value is a DTensor. \param names  The pickle was read with their rules.
bool is_pickled_dtensor(const Pickle& pickle, const GlobalNames& names, const PickleValue& value);

/// Reads the part of a DTensor: Shard, also of uneven sizes and in any order of the dims of its mesh, Replicate, and
/// the _StridedShard that FSDP makes over tensor parallelism, on a mesh of any dims along which ranks ascend. Knows
/// what torch 2.6 to 2.15 write.
///
/// \param value  Of which `is_pickled_dtensor` holds.
/// \param why_not  Receives the reason if it cannot be read.
/// \returns nullopt then. The numbers of `local` are not checked: see `read_pickled_tensor`.
std::optional<PickledDTensor> read_pickled_dtensor(const Pickle& pickle, const GlobalNames& names,
                                                   const PickleValue& value, std::string* why_not);

}  // namespace bytecheckpoint::format
