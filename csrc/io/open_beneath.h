// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace bytecheckpoint::io {

/// Opens `name`, which comes from a checkpoint and is not trusted, such that nothing outside `directory` is opened: no
/// absolute name, no `..`, no symbolic link anywhere in it. Does not wait for FIFOs and devices.
///
/// \param directory  Descriptor of a directory.
/// \param flags      As for open(2); O_CLOEXEC, O_NOCTTY and O_NONBLOCK are added.
/// \returns a descriptor, or -1 with errno: EXDEV for a name that leads out, ELOOP for a link, EINVAL for an empty
/// name.
int open_beneath(int directory, const std::string& name, int flags);

/// The same, one directory after the other, for kernels without openat2 and sandboxes that refuse it.
int open_beneath_by_steps(int directory, const std::string& name, int flags);

}  // namespace bytecheckpoint::io
