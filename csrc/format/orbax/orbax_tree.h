// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"

namespace bytecheckpoint::format {

/// One value of the tree that Orbax has saved.
struct OrbaxLeaf {
  enum class Kind : uint8_t {
    kArray,   // in a folder of its own
    kString,  // in `_strings.json`
    kNone,
    kEmptyDict,
    kEmptyList,
    kOther,  // nothing of it is stored but its type
  };

  std::string name;  // its keys, joined by dots: also of the folder
  std::string path;  // its keys, as a `Tree` encodes a tuple of strings and ints
  std::string type;  // as Orbax calls it
  Kind kind = Kind::kArray;
};

/// What `_METADATA` says of a checkpoint.
struct OrbaxTree {
  std::vector<OrbaxLeaf> leaves;
  bool is_in_database = false;  // OCDBT has the arrays
  bool is_zarr3 = false;
  bool has_all_chunks = false;  // also those of the fill value alone, which older releases leave out
};

/// Reads the file `_METADATA`. \returns kCorrupt for damage, and for two values of one name.
base::Result<OrbaxTree> read_orbax_tree(std::string_view json);
/// Reads the file `_strings.json`: strings by their names. \returns kCorrupt.
base::Result<std::map<std::string, std::string>> read_orbax_strings(std::string_view json);

}  // namespace bytecheckpoint::format
