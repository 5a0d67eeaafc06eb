// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace bytecheckpoint::io {

/// Opens `name`, which a checkpoint gave, so that nothing outside `directory` is ever opened: no absolute name, no way
/// up, no symbolic link anywhere in it. FIFOs and devices are not waited for.
///
/// \param directory  Descriptor of a directory.
/// \param flags      Of open; O_CLOEXEC, O_NOCTTY and O_NONBLOCK are added.
/// \returns a descriptor, or -1 with errno: EXDEV for a name that leads out, ELOOP for a link, EINVAL for no name.
int open_beneath(int directory, const std::string& name, int flags);

/// The same, step by step, for kernels without openat2 and sandboxes that do not let it through.
int open_beneath_by_steps(int directory, const std::string& name, int flags);

}  // namespace bytecheckpoint::io
