// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/open_any_checkpoint.h"

#include <cerrno>
#include <utility>

#include "csrc/engine/open/open_deepspeed.h"
#include "csrc/engine/open/open_orbax.h"
#include "csrc/engine/open/open_safetensors.h"
#include "csrc/engine/open/open_torch_file.h"

namespace bytecheckpoint::engine {

base::Result<format::Manifest> open_any_checkpoint(const std::string& path, const OpenOptions& options) {
  const auto is_found = [](const base::Result<format::Manifest>& opened) {
    return opened.is_ok() || opened.status().code() != base::Code::kNotFound;
  };
  base::Result<format::Manifest> ours = open_checkpoint(path, options);
  if (is_found(ours) || options.scope.has_value()) return ours;
  base::Result<format::Manifest> safetensors = open_safetensors(path);
  if (is_found(safetensors)) return safetensors;
  base::Result<format::Manifest> of_torch = open_torch_file(path);
  if (is_found(of_torch)) return of_torch;
  base::Result<format::Manifest> of_deepspeed = open_deepspeed(path);
  if (is_found(of_deepspeed)) return of_deepspeed;
  base::Result<format::Manifest> of_orbax = open_orbax(path);
  return is_found(of_orbax) ? std::move(of_orbax) : std::move(ours);
}

base::Status explain_removed(const char* what, const std::string& path, Scope scope, base::Status failure) {
  const base::Status now = open_any_checkpoint(path, {scope}).status();
  if (now.code() != base::Code::kNotFound) return failure;
  return base::Status::make(
      base::Code::kNotFound,
      base::text(what, "(", path, "): the checkpoint was removed while it was read, such as by a ",
                 "prune of another process: nothing of it is damaged. Choose another one (", failure.message(), ")"),
      path, ENOENT);
}

}  // namespace bytecheckpoint::engine
