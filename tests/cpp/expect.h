// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

#include <string>
#include <string_view>
#include <utility>

#include "csrc/base/status.h"

namespace bytecheckpoint::test {

inline base::Status status_of(base::Status status) {
  return status;
}
template <class T>
base::Status status_of(const base::Result<T>& result) {
  return result.status();
}

/// Returns the value. If there is none, shows the message and ends the test case.
template <class T>
T value_of(base::Result<T> result) {
  INFO(result.status().message());
  REQUIRE(result.is_ok());
  return std::move(result.value());
}

inline bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != text.npos;
}

}  // namespace bytecheckpoint::test

/// Requires a Status or Result to be ok.
#define EXPECT_OK(...)                                                                             \
  do {                                                                                             \
    const ::bytecheckpoint::base::Status status_ = ::bytecheckpoint::test::status_of(__VA_ARGS__); \
    INFO(status_.message());                                                                       \
    REQUIRE(status_.is_ok());                                                                      \
  } while (false)

/// Requires a Status or Result to have failed with this code.
#define EXPECT_CODE(wanted, ...)                                                                         \
  do {                                                                                                   \
    const ::bytecheckpoint::base::Status status_ = ::bytecheckpoint::test::status_of(__VA_ARGS__);       \
    INFO(status_.message());                                                                             \
    REQUIRE(static_cast<int>(status_.code()) == static_cast<int>(::bytecheckpoint::base::Code::wanted)); \
  } while (false)

/// Requires that too, and a message that contains `part`.
#define EXPECT_FAILURE(wanted, part, ...)                                                                \
  do {                                                                                                   \
    const ::bytecheckpoint::base::Status status_ = ::bytecheckpoint::test::status_of(__VA_ARGS__);       \
    INFO(status_.message());                                                                             \
    REQUIRE(static_cast<int>(status_.code()) == static_cast<int>(::bytecheckpoint::base::Code::wanted)); \
    CHECK(::bytecheckpoint::test::contains(status_.message(), part));                                    \
  } while (false)
