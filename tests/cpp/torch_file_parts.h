// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/pickle_parts.h"
#include "tests/cpp/zip_of.h"

/// Pieces of files of torch.save, to build such as torch would not write.
namespace bytecheckpoint::test {

/// A tensor of float32 in storage `key`, as torch pickles it.
inline std::string pickled_floats(const std::string& key, int64_t storage_elements, int64_t first,
                                  std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides) {
  using namespace pickled;  // NOLINT
  const auto ints = [](std::initializer_list<int64_t> values) {
    std::string bytes = "(";
    for (const int64_t value : values) bytes += number(value);
    return bytes + "t";
  };
  const std::string storage =
      tuple({text("storage"), global("torch", "FloatStorage"), text(key), text("cpu"), number(storage_elements)}) + "Q";
  return call(global("torch._utils", "_rebuild_tensor_v2"),
              tuple({storage, number(first), ints(sizes), ints(strides), "\x89",
                     call(global("collections", "OrderedDict"), ")")}));
}

/// A file of torch.save of the value whose pickle is `value`.
inline std::string torch_file_of(const std::string& value, std::vector<std::pair<std::string, std::string>> storages,
                                 const std::string& order = "little") {
  std::vector<std::pair<std::string, std::string>> entries = {{"m/data.pkl", pickled::whole(value)},
                                                              {"m/byteorder", order}};
  for (auto& [key, content] : storages) entries.emplace_back("m/data/" + key, std::move(content));
  return zip_of(entries);
}

}  // namespace bytecheckpoint::test
