// SPDX-License-Identifier: Apache-2.0
// Replays the fuzzing corpora and findings through the same properties in every build of the tests:
// tests/fuzz/README.md.
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "csrc/base/bytes.h"
#include "csrc/format/manifest/metadata_file.h"
#include "csrc/format/torch/builtin_archive.h"
#include "tests/cpp/sample_manifest.h"
#include "tests/fuzz/targets.h"

namespace bytecheckpoint::fuzz {
namespace {

namespace fs = std::filesystem;

const fs::path kFolder = BCP_FUZZ_DATA;

std::string content_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  REQUIRE_MESSAGE(file.good(), path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Unpacks inputs that tests/fuzz/corpus.py packed.
std::vector<std::string> inputs_of(const fs::path& corpus) {
  const std::string packed = content_of(corpus);
  std::vector<std::string> inputs;
  base::ByteReader in(packed);
  while (in.remaining() != 0) inputs.push_back(in.string());
  REQUIRE(in.ok());
  return inputs;
}

void replay(const Target& target, const std::string& bytes, const std::string& what) {
  // The memory has exactly the input's size, so that sanitizers notice a read past the end.
  const std::vector<char> exact(bytes.begin(), bytes.end());
  const std::string fault = target.property({exact.data(), exact.size()});
  CHECK_MESSAGE(fault.empty(), target.name, ", ", what, ": ", fault);
}

/// Changes nothing, so a mutation returns its input, signed again.
struct NoChange : Change {
  std::string operator()(std::string_view part, size_t) override { return std::string(part); }
  size_t below(size_t limit) override { return limit > next ? next++ : limit - 1; }
  size_t next = 1;
};

TEST_CASE("fuzz: every property holds of every input of its corpus") {
  for (const Target& target : kTargets) {
    const std::vector<std::string> inputs = inputs_of(kFolder / "corpus" / (std::string(target.name) + ".corpus"));
    CHECK_MESSAGE(inputs.size() > 4, target.name);
    for (size_t i = 0; i < inputs.size(); ++i) replay(target, inputs[i], std::to_string(i));
  }
}

TEST_CASE("fuzz: what was found once is not found again") {
  std::set<std::string> names;
  for (const Target& target : kTargets) names.insert(std::string(target.name));
  size_t num_findings = 0;
  for (const fs::directory_entry& folder : fs::directory_iterator(kFolder / "findings")) {
    const std::string name = folder.path().filename().string();
    REQUIRE_MESSAGE(names.count(name) == 1, name);
    for (const fs::directory_entry& file : fs::directory_iterator(folder)) {
      replay(*find_target(name), content_of(file.path()), file.path().filename().string());
      ++num_findings;
    }
  }
  CHECK(num_findings > 0);
}

TEST_CASE("fuzz: the mutations get behind checksums and lengths") {
  NoChange change;
  const std::string file = format::encode_metadata_file(test::sample_manifest());
  const std::string signed_anew = mutate_metadata_file(file, file.size(), &change);
  REQUIRE(format::decode_metadata_file(signed_anew).is_ok());
  CHECK(format::check_pickle(signed_anew).is_ok());
  CHECK(format::decode_metadata_file(signed_anew).value().items.size() == 5);

  const std::string manifest = format::encode_manifest(test::sample_manifest());
  CHECK(mutate_manifest(manifest, manifest.size() + 1000, &change) == manifest);

  const format::Tree tree = test::holding(format::Tree::Kind::kTuple, {{}, {}, {}});
  const std::string archive = format::encode_builtin_archive(tree);
  const auto decoded = format::decode_builtin_archive(mutate_archive(archive, archive.size() + 1000, &change));
  REQUIRE(decoded.is_ok());
  CHECK(decoded.value().has_value());
}

}  // namespace
}  // namespace bytecheckpoint::fuzz
