// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/orbax/orbax_tree.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/format/json/json_reader.h"
#include "csrc/format/tree.h"

namespace bytecheckpoint::format {
namespace {

using base::Status;
using base::text;

using LeafKind = OrbaxLeaf::Kind;

/// One key on the way to a value.
struct Key {
  std::string name;
  bool is_position = false;  // in a list or a tuple
};

base::Result<Key> read_key(JsonReader* in) {
  constexpr int64_t kSequence = 1;
  Key out;
  BCP_RETURN_IF_ERROR(in->object([&](const std::string& key) -> Status {
    if (key == "key") {
      BCP_ASSIGN_OR_RETURN(out.name, in->string());
    } else if (key == "key_type") {
      BCP_ASSIGN_OR_RETURN(const int64_t type, in->integer());
      out.is_position = type == kSequence;
    } else {
      return in->skip();
    }
    return Status::ok();
  }));
  return out;
}

LeafKind kind_of(const std::string& type, bool is_skipped) {
  if (!is_skipped) return type == "string" ? LeafKind::kString : LeafKind::kArray;
  if (type == "None") return LeafKind::kNone;
  if (type == "Dict") return LeafKind::kEmptyDict;
  return type == "List" ? LeafKind::kEmptyList : LeafKind::kOther;
}

Status read_value(JsonReader* in, OrbaxLeaf* leaf) {
  bool is_skipped = false;
  BCP_RETURN_IF_ERROR(in->object([&](const std::string& key) -> Status {
    if (key == "value_type") {
      BCP_ASSIGN_OR_RETURN(leaf->type, in->string());
    } else if (key == "skip_deserialize") {
      BCP_ASSIGN_OR_RETURN(is_skipped, in->boolean());
    } else {
      return in->skip();
    }
    return Status::ok();
  }));
  leaf->kind = kind_of(leaf->type, is_skipped);
  return Status::ok();
}

void set_keys(const std::vector<Key>& keys, OrbaxLeaf* leaf) {
  constexpr size_t kMostDigits = 9;
  base::ByteWriter out;
  encode_container(Tree::Kind::kTuple, keys.size(), &out);
  for (const Key& key : keys) {
    if (!leaf->name.empty()) leaf->name += '.';
    leaf->name += key.name;
    const bool is_number = key.is_position && !key.name.empty() && key.name.size() <= kMostDigits &&
                           key.name.find_first_not_of("0123456789") == std::string::npos;
    if (is_number) {
      encode_int(std::strtoll(key.name.c_str(), nullptr, 10), &out);
    } else {
      encode_text(Tree::Kind::kString, key.name, &out);
    }
  }
  leaf->path = out.take();
}

Status read_leaf(JsonReader* in, OrbaxLeaf* leaf) {
  return in->object([&](const std::string& key) -> Status {
    if (key == "value_metadata") return read_value(in, leaf);
    if (key != "key_metadata") return in->skip();
    std::vector<Key> keys;
    BCP_RETURN_IF_ERROR(in->array([&]() -> Status {
      BCP_ASSIGN_OR_RETURN(keys.emplace_back(), read_key(in));
      return Status::ok();
    }));
    set_keys(keys, leaf);
    return Status::ok();
  });
}

Status read_leaves(JsonReader* in, std::vector<OrbaxLeaf>* leaves) {
  return in->object([&](const std::string& key) -> Status {
    const size_t at = in->position();
    OrbaxLeaf& leaf = leaves->emplace_back();
    BCP_RETURN_IF_ERROR(read_leaf(in, &leaf));
    if (leaf.name.empty()) return JsonReader::fault(at, text("the value ", key, " has no keys"));
    const bool is_file_name = leaf.name.find('\0') == std::string::npos;
    return is_file_name ? Status::ok() : JsonReader::fault(at, "a key has a NUL, which no name of a folder can have");
  });
}

}  // namespace

base::Result<OrbaxTree> read_orbax_tree(std::string_view json) {
  JsonReader in(json);
  OrbaxTree tree;
  const auto read_flag = [&](bool* flag) -> Status {
    if (in.take_null()) return Status::ok();
    BCP_ASSIGN_OR_RETURN(*flag, in.boolean());
    return Status::ok();
  };
  bool has_tree = false;
  BCP_RETURN_IF_ERROR(in.object([&](const std::string& key) {
    has_tree |= key == "tree_metadata";
    if (key == "tree_metadata") return read_leaves(&in, &tree.leaves);
    if (key == "use_ocdbt") return read_flag(&tree.is_in_database);
    if (key == "use_zarr3") return read_flag(&tree.is_zarr3);
    if (key == "store_array_data_equal_to_fill_value") return read_flag(&tree.has_all_chunks);
    return in.skip();
  }));
  BCP_RETURN_IF_ERROR(in.end());
  if (!has_tree) return JsonReader::fault(0, "it has no 'tree_metadata', which says what there is");
  std::sort(tree.leaves.begin(), tree.leaves.end(),
            [](const OrbaxLeaf& a, const OrbaxLeaf& b) { return a.name < b.name; });
  const auto twice = std::adjacent_find(tree.leaves.begin(), tree.leaves.end(),
                                        [](const OrbaxLeaf& a, const OrbaxLeaf& b) { return a.name == b.name; });
  if (twice == tree.leaves.end()) return tree;
  return JsonReader::fault(0, text("two values have the name '", twice->name, "'"));
}

base::Result<std::map<std::string, std::string>> read_orbax_strings(std::string_view json) {
  JsonReader in(json);
  std::map<std::string, std::string> strings;
  BCP_RETURN_IF_ERROR(in.object([&](const std::string& key) -> Status {
    BCP_ASSIGN_OR_RETURN(strings[key], in.string());
    return Status::ok();
  }));
  BCP_RETURN_IF_ERROR(in.end());
  return strings;
}

}  // namespace bytecheckpoint::format
