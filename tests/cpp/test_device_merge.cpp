// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/device_merge.h"

#include <doctest/doctest.h>

#include <string>

namespace bytecheckpoint::staging {
namespace {

// These tests are built without nvcc. tests/gpu tests a device.
TEST_CASE("device_merge: without device code it says that it is unsupported, and why") {
  CHECK(!DeviceMerge::is_built());
  CHECK(std::string(DeviceMerge::architectures()).empty());
  const auto created = DeviceMerge::create(0);
  REQUIRE(!created.is_ok());
  CHECK(created.status().code() == base::Code::kUnsupported);
  CHECK(created.status().message().find("nvcc") != std::string::npos);
}

}  // namespace
}  // namespace bytecheckpoint::staging
