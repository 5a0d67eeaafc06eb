// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/device_transfers.h"

#include <doctest/doctest.h>

#include <chrono>

#include "tests/cpp/expect.h"

namespace bytecheckpoint::staging {
namespace {

// These tests are built without nvcc. tests/cuda tests device code on the host, tests/gpu tests a device.
TEST_CASE("device_transfers: where no device can be copied from, it is said each time, and nothing is under way") {
  for (int i = 0; i < 2; ++i) {
    CHECK(SharedDeviceMerge::find(0).status().code() == base::Code::kUnsupported);
    SharedDeviceMerge::drop_all();
  }
  DeviceTransfers transfers;
  CHECK(!transfers.is_under_way());
  CHECK(test::value_of(transfers.wait_for(std::chrono::milliseconds(0))));
}

TEST_CASE("device_transfers: pages that cannot be locked are tried once") {
  const auto pages = test::value_of(Pages::map(6 << 20, "test", Pages::InFork::kAbsent));
  CHECK(!pin_pages(0, 1000, pages.get()).is_ok());
  CHECK(pages->held_bytes() == 2 << 20);
  CHECK(pin_pages(0, 2 << 20, pages.get()).is_ok());
  CHECK(!pin_pages(0, (4 << 20) + 1, pages.get()).is_ok());
  CHECK(pages->held_bytes() == 6 << 20);
}

}  // namespace
}  // namespace bytecheckpoint::staging
