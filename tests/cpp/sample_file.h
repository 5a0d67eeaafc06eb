// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

#include <fstream>
#include <sstream>
#include <string>

namespace bytecheckpoint::test {

/// The bytes of a file of tests/cpp/data, which make_data.py made.
inline std::string sample_file(const std::string& name) {
  std::ifstream file(std::string(BCP_TEST_DATA "/") + name, std::ios::binary);
  REQUIRE_MESSAGE(file.good(), name);
  std::stringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

}  // namespace bytecheckpoint::test
