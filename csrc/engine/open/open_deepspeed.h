// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::engine {

/// Makes a manifest of a step of DeepSpeed, whose ranks each have a part of flattened parameters. Elements are not
/// read.
///
///     name                   what it is
///     ----                   ----------
///     module.NAME            the weights that the optimizer has, in fp32 mostly; of what it has not (buffers, frozen
///                            parameters), what the module has
///     optimizer.NAME.KEY     what the optimizer has for each element of it: `exp_avg`, `exp_avg_sq`
///     others                 as rank 0 has them: `global_steps`, `lr_scheduler.*`, `optimizer_state_dict.*`
///
/// ZeRO-1 and 2 say which part of a parameter a rank has (`param_slice_mappings`). In ZeRO-3 each rank has an equal
/// part of each, one behind the other. Parameters of other ranks of tensor or pipeline parallelism are not joined.
///
/// A universal checkpoint (`ds_to_universal.py`) has each of these in a file of its own, whole:
/// `zero/NAME/exp_avg.pt`.
///
/// \param path  Folder of the step, or of the run, whose file `latest` names a step.
/// \returns kNotFound if there is none. kCorrupt if parts are missing or do not fit. kUnsupported for several ranks of
/// tensor or pipeline parallelism, and for versions that do not say where the parts are. What `read_torch_files` fails
/// with. kStorage.
base::Result<format::Manifest> open_deepspeed(const std::string& path);

}  // namespace bytecheckpoint::engine
