// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::engine {

/// The files of a step of DeepSpeed. Each list is in the order of ranks.
struct ZeroStep {
  /// A file of a universal checkpoint, which has one value of one parameter, whole.
  struct Whole {
    std::string parameter;
    std::string key;  // `fp32`, or what the optimizer calls it: `exp_avg`
  };

  std::string directory;
  std::vector<std::string> models;
  std::vector<std::string> optimizers;  // of a universal checkpoint: at most one, of which only objects are taken
  std::vector<Whole> wholes;            // of a universal checkpoint alone; their files are behind all others
  bool is_universal = false;
};

/// Joins the parts that ranks have of parameters, or takes whole ones, as `open_deepspeed` says.
/// \param manifest  What `read_torch_files` has read of the files of models, optimizers and wholes, in this order. The
/// values of wholes have their keys as roots. Its items become those of the step.
/// \returns kCorrupt if parts are missing or do not fit. kUnsupported for optimizers that do not say where parts are.
base::Status join_zero_parts(const ZeroStep& step, format::Manifest* manifest);

}  // namespace bytecheckpoint::engine
