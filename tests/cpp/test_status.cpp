// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/status.h"

#include <doctest/doctest.h>

#include <cerrno>
#include <memory>
#include <string>

namespace bytecheckpoint::base {
namespace {

Status pass_on(Status status) {
  BCP_RETURN_IF_ERROR(std::move(status));
  return Status::make(Code::kInvalidArgument, "reached");
}

Result<int> doubled(Result<int> input) {
  BCP_ASSIGN_OR_RETURN(const int value, std::move(input));
  return 2 * value;
}

TEST_CASE("status: ok says nothing") {
  CHECK(Status().is_ok());
  CHECK(Status::ok().with_context("while saving").message().empty());
}

TEST_CASE("status: a refusal of the file system names operation, path, detail and errno") {
  const Status status = Status::storage("pread", "/ckpt/a", "offset=12", EIO);
  CHECK(status.message() == "pread(/ckpt/a, offset=12): Input/output error (errno 5)");
  CHECK(status.path() == "/ckpt/a");
  CHECK(status.sys_errno() == EIO);
  CHECK((status.code() == Code::kStorage));
  CHECK(Status::storage("open", "/x", "", ENOENT).message() == "open(/x): No such file or directory (errno 2)");
}

TEST_CASE("status: context is added in front and keeps the rest") {
  const Status status =
      Status::storage("open", "/x", "", ENOENT).with_context("while loading 'w'").with_context("load");
  CHECK(status.message() == "load: while loading 'w': open(/x): No such file or directory (errno 2)");
  CHECK(status.sys_errno() == ENOENT);
  CHECK(status.path() == "/x");
}

TEST_CASE("status: macros pass the failure or the value on") {
  CHECK(pass_on(Status::make(Code::kBusy, "busy")).message() == "busy");
  CHECK(pass_on(Status::ok()).message() == "reached");
  CHECK(doubled(21).value() == 42);
  CHECK((doubled(Status::make(Code::kCorrupt, "bad")).status().code() == Code::kCorrupt));
}

TEST_CASE("status: a result may hold what can only be moved") {
  Result<std::unique_ptr<int>> result = std::make_unique<int>(3);
  REQUIRE(result.is_ok());
  CHECK(result.status().is_ok());
  const std::unique_ptr<int> taken = std::move(result.value());
  CHECK(*taken == 3);
}

TEST_CASE("status: text joins strings and numbers") {
  CHECK(text("a", std::string("b"), std::string_view("c"), 12, ", ", int64_t{-3}) == "abc12, -3");
}

}  // namespace
}  // namespace bytecheckpoint::base
