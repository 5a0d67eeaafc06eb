// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/api/include/torch/version.h>

#include <sstream>
#include <string>

#include "csrc/base/crc32.h"
#include "csrc/base/failpoint.h"
#include "csrc/format/data_file.h"
#include "csrc/staging/device_merge.h"

namespace bytecheckpoint::bindings {

/// Returns what was compiled into this module.
inline pybind11::dict build_info() {
  pybind11::dict info;
  info["format_version"] = format::kFormatVersion;
  info["compiler"] = __VERSION__;
  info["cplusplus"] = static_cast<int64_t>(__cplusplus);
  info["torch"] = TORCH_VERSION;  // the version compiled against: other versions lay tensors out differently
  info["crc32"] = base::crc32_kernel_name();
  pybind11::list failpoints;
#if defined(BCP_FAILPOINTS)
  for (const char* name : base::kFailpointNames) failpoints.append(name);
#endif
  info["failpoints"] = failpoints;
  pybind11::list architectures;
  std::istringstream names(staging::DeviceMerge::architectures());
  for (std::string name; names >> name;) architectures.append(name);
  info["cuda"] = architectures;
  return info;
}

}  // namespace bytecheckpoint::bindings
