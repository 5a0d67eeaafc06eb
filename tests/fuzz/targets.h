// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/fuzz/mutations.h"
#include "tests/fuzz/property.h"

namespace bytecheckpoint::fuzz {

// Each property is in the file of its name, fuzz_*.cpp.
std::string block_ranges(std::string_view bytes);
std::string builtin_archive(std::string_view bytes);
std::string data_file(std::string_view bytes);
std::string foreign_metadata(std::string_view bytes);
std::string inventory_blob(std::string_view bytes);
std::string manifest(std::string_view bytes);
std::string manifest_view(std::string_view bytes);
std::string metadata_file(std::string_view bytes);
std::string orbax(std::string_view bytes);
std::string pickle_reader(std::string_view bytes);
std::string pickle_tree(std::string_view bytes);
std::string rank_assignment(std::string_view bytes);
std::string safetensors(std::string_view bytes);
std::string standard_pickle(std::string_view bytes);
std::string torch_archive(std::string_view bytes);
std::string torch_file(std::string_view bytes);
std::string tree(std::string_view bytes);
std::string write_result(std::string_view bytes);
std::string zip_record(std::string_view bytes);

struct Target {
  std::string_view name;
  Property property;
  Mutation mutation = nullptr;  // in addition to libFuzzer's own mutations
};

inline constexpr Target kTargets[] = {
    {"block_ranges", block_ranges},
    {"builtin_archive", builtin_archive, mutate_archive},
    {"data_file", data_file, mutate_data_file},
    {"foreign_metadata", foreign_metadata, mutate_pickle},
    {"inventory_blob", inventory_blob},
    {"manifest", manifest, mutate_manifest},
    {"manifest_view", manifest_view, mutate_metadata_file},
    {"metadata_file", metadata_file, mutate_metadata_file},
    {"orbax", orbax},
    {"pickle_reader", pickle_reader, mutate_pickle},
    {"pickle_tree", pickle_tree, mutate_pickle},
    {"rank_assignment", rank_assignment, mutate_assignment},
    {"safetensors", safetensors},
    {"standard_pickle", standard_pickle, mutate_pickle},
    {"torch_archive", torch_archive, mutate_archive},
    {"torch_file", torch_file, mutate_archive},
    {"tree", tree},
    {"write_result", write_result},
    {"zip_record", zip_record},
};

constexpr const Target* find_target(std::string_view name) {
  for (const Target& target : kTargets) {
    if (target.name == name) return &target;
  }
  return nullptr;
}

}  // namespace bytecheckpoint::fuzz
