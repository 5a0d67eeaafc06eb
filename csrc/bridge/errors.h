// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "csrc/base/status.h"

namespace bytecheckpoint::bridge {

/// Makes a str from any bytes, and escapes what is not UTF-8: messages quote what was found on disk.
pybind11::str to_text(const std::string& bytes);

/// Throws `bytecheckpoint.errors.from_status(...)`. Needs the GIL.
[[noreturn]] void raise(const base::Status& status);

/// Throws `bytecheckpoint.errors.<class_name>(message)`, for classes that no `base::Code` has.
[[noreturn]] void raise_as(const char* class_name, const std::string& message);

/// Throws InvalidPlanError for the exception that is being handled: a value of which DCP or torch cannot say shape or
/// shards. Errors of ours, and those that are no Exception, are thrown again as they are.
[[noreturn]] void raise_for_value(const std::string& fqn, pybind11::handle value);

/// Raises the status unless it is ok. Needs the GIL.
inline void raise_if_error(const base::Status& status) {
  if (!status.is_ok()) raise(status);
}

template <class T>
T value_or_raise(base::Result<T> result) {
  raise_if_error(result.status());
  return std::move(result.value());
}

}  // namespace bytecheckpoint::bridge
