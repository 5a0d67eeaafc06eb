// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/names.h"

#include <string>

#include "tests/cpp/expect.h"

namespace bytecheckpoint::engine {
namespace {

const std::string kDigits = "0123456789abcdef0123456789abcdef";

TEST_CASE("names: names of tmps and of ranks' commit marks") {
  base::Id id{};
  id[0] = 0xAB;
  CHECK(tmp_name(id) == ".metadata.ab000000000000000000000000000000.tmp");
  CHECK(is_tmp_name(tmp_name(id)));
  CHECK(is_tmp_name("__12.metadata." + kDigits + ".tmp"));
  for (const std::string& name :
       {std::string(), std::string(".metadata"), std::string(".metadata.tmp"), ".metadata." + kDigits,
        ".metadata." + kDigits.substr(1) + ".tmp", ".metadata." + kDigits + "0.tmp", "x.metadata." + kDigits + ".tmp",
        "__x.metadata." + kDigits + ".tmp", ".metadata." + std::string(32, 'A') + ".tmp",
        ".metadata." + kDigits + ".tmp2", "__12345678901.metadata." + kDigits + ".tmp"}) {
    CAPTURE(name);
    CHECK_FALSE(is_tmp_name(name));
  }
  CHECK(is_rank_metadata_name("__0.metadata"));
  CHECK(is_rank_metadata_name("__10000.metadata"));
  for (const char* name :
       {".metadata", "__.metadata", "__0.metadata2", "_0.metadata", "__a.metadata", "__0metadata", ""}) {
    CAPTURE(name);
    CHECK_FALSE(is_rank_metadata_name(name));
  }
}

TEST_CASE("names: a name with underscores and no rank is no tmp") {
  const std::string name = tmp_name(base::Id{});
  CHECK(is_tmp_name(name));
  CHECK(is_tmp_name("__12" + name));
  CHECK_FALSE(is_tmp_name("__" + name));
}

TEST_CASE("names: a save of one rank has names of its own, and meets only its own and global ones") {
  const base::Id id{};
  for (const uint32_t rank : {0u, 7u, 4294967295u}) {
    Scope scope;
    REQUIRE(is_tmp_name(tmp_name(id, rank), &scope));
    CHECK(scope == Scope(rank));
    CHECK(is_rank_metadata_name(mark_name(rank)));
  }
  Scope scope = 3;
  REQUIRE(is_tmp_name(tmp_name(id), &scope));
  CHECK_FALSE(scope.has_value());
  CHECK(mark_name({}) == ".metadata");
  CHECK_FALSE(is_tmp_name("__4294967296.metadata." + kDigits + ".tmp"));

  CHECK(concerns({}, {}));
  CHECK(concerns({}, 1));
  CHECK(concerns(1, {}));
  CHECK(concerns(1, 1));
  CHECK_FALSE(concerns(1, 2));

  const std::string file = "__1_0.0123456789abcdef.distcp";
  CHECK(is_data_file_of({}, file));
  CHECK(is_data_file_of(1, file));
  CHECK_FALSE(is_data_file_of(0, file));
  CHECK_FALSE(is_data_file_of(11, file));
  CHECK_FALSE(is_data_file_of(1, "__1_0.distcp"));
}

TEST_CASE("names: data files of any writer") {
  for (const char* name :
       {"__0_0.distcp", "__12_3.distcp", "__1_0.0123456789abcdef.distcp", ".metadata.tmp", "__3.metadata.tmp"}) {
    CHECK(is_data_file_of_any_writer(name));
  }
  for (const char* name : {".metadata", "__0.metadata", "__0_.distcp", "__0_0x.distcp", "__0_0.distcp.bak",
                           "0_0.distcp", "_0_0.distcp", "__0_0.DISTCP", "a__0_0.distcp", "", "__", "__0", "__0_0"}) {
    CHECK_FALSE(is_data_file_of_any_writer(name));
  }
}

}  // namespace
}  // namespace bytecheckpoint::engine
