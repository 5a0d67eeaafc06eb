// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "csrc/io/object_store.h"

namespace bytecheckpoint::bridge {

/// The objects below `url`, through the client that Python has: `StoreClient`, in storage/object_store/client.py. Calls
/// take the GIL; the client lets go of it while it waits for the store.
///
/// \param client  Has `open(name) -> (bytes, version)`, `read(name, version, offset, size) -> buffer`,
/// `upload(name, parts) -> future`, `copy(from, name)` and `names(folder) -> list`. They raise OSErrors with an errno.
/// If the objects are memory of this machine, it has instead of `read` and `upload` `descriptor(name) -> int`,
/// `spare(name) -> int`, `reserve(name, bytes, there)` and `keep(name, descriptor)`: `HolderClient`, in
/// storage/memory/client.py.
std::shared_ptr<io::ObjectStore> python_store(std::string url, pybind11::object client);

}  // namespace bytecheckpoint::bridge
