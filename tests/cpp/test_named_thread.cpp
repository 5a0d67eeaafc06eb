// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/named_thread.h"

#include <doctest/doctest.h>

#include <fstream>
#include <string>

namespace bytecheckpoint::base {
namespace {

std::string own_name() {
  std::string name;
  std::getline(std::ifstream("/proc/thread-self/comm") >> std::ws, name);
  return name;
}

TEST_CASE("named_thread: the system knows the name, of this thread alone") {
  const std::string before = own_name();
  std::string name, longest;
  named_thread("bcp-test", [&] { name = own_name(); }).join();
  named_thread("bcp-fifteen-big", [&longest] { longest = own_name(); }).join();
  CHECK(name == "bcp-test");
  CHECK(longest == "bcp-fifteen-big");
  CHECK(own_name() == before);
}

}  // namespace
}  // namespace bytecheckpoint::base
