// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/status.h"

#include <system_error>

namespace bytecheckpoint::base {

Status Status::storage(std::string_view operation, const std::string& path, std::string_view detail, int sys_errno) {
  std::string message = text(operation, "(", path);
  if (!detail.empty()) message += text(", ", detail);
  // generic_category is thread-safe, strerror is not.
  message += text("): ", std::generic_category().message(sys_errno), " (errno ", sys_errno, ")");
  return make(Code::kStorage, std::move(message), path, sys_errno);
}

Status Status::with_context(std::string_view context) && {
  if (!is_ok()) message_ = text(context, ": ", message_);
  return std::move(*this);
}

Status Status::at(int64_t offset, int64_t num_bytes) && {
  if (!is_ok()) {
    offset_ = offset;
    num_bytes_ = num_bytes;
  }
  return std::move(*this);
}

Status Status::in_file(const std::string& path) && {
  if (is_ok()) return std::move(*this);
  const std::string where = offset_ < 0 ? "" : text(", offset=", offset_, ", ", num_bytes_, " bytes");
  message_ = text("read(", path, where, "): ", message_);
  path_ = path;
  return std::move(*this);
}

}  // namespace bytecheckpoint::base
