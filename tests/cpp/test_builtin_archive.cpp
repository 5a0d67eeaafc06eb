// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/builtin_archive.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "csrc/base/crc32.h"
#include "csrc/base/utf8.h"
#include "csrc/format/archive/archive_reader.h"
#include "csrc/format/archive/zip_directory.h"
#include "csrc/format/pickle/pickle_writer.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/mutate.h"
#include "tests/cpp/pickle_parts.h"
#include "tests/cpp/random_tree.h"
#include "tests/cpp/sample_file.h"
#include "tests/cpp/zip_of.h"

// tests/unit/test_builtin_objects.py checks from Python, with more values, that torch.load reads these archives, and
// that we read those of torch.save.

namespace bytecheckpoint::format {
namespace {

using namespace test::pickled;  // NOLINT
using test::holding;
using test::integer;
using test::leaf;
using test::real;
using test::string;
using Kind = Tree::Kind;
using Decoded = std::optional<Tree>;

Decoded decoded(const std::string& archive) {
  return test::value_of(decode_builtin_archive(archive));
}

/// A torch.save archive around a pickle.
std::string archive_of(const std::string& pickle) {
  return test::zip_of({{"archive/data.pkl", pickle}, {"archive/version", "3\n"}});
}
Decoded unpickled(const std::string& value) {
  return decoded(archive_of(whole(value)));
}

/// The value of `BUILTIN` in make_data.py.
Tree sample_tree() {
  return holding(
      Kind::kDict,
      {string("lr"),
       real(0.001),
       string("betas"),
       holding(Kind::kTuple, {real(0.9), real(0.95)}),
       string("amsgrad"),
       leaf(Kind::kFalse),
       string("fused"),
       leaf(Kind::kTrue),
       string("foreach"),
       leaf(Kind::kNone),
       string("\xC3\xA9"),
       holding(Kind::kDict, {integer(-1), real(-0.0), holding(Kind::kTuple, {}), leaf(Kind::kNone)}),
       string("params"),
       holding(Kind::kList, {integer(0), integer(300), integer(70000), integer(std::numeric_limits<int64_t>::min()),
                             real(std::numeric_limits<double>::infinity())}),
       string("raw"),
       string(std::string("\0\xFF", 2), Kind::kBytes),
       string("empty"),
       holding(Kind::kList, {}),
       string("lr again"),
       string("lr")});
}

TEST_CASE("builtin_archive: random trees come back equal") {
  test::Random random(31);
  for (int round = 0; round < 2000; ++round) {
    const Tree tree = test::draw_tree(&random, 5);
    const std::string archive = encode_builtin_archive(tree);
    REQUIRE(archive == encode_builtin_archive(Tree(tree)));
    const Decoded back = decoded(archive);
    REQUIRE(back.has_value());
    REQUIRE(*back == tree);
  }
}

TEST_CASE("builtin_archive: what torch.save wrote") {
  for (const char* name : {"builtin.pt", "builtin_protocol4.pt", "builtin_no_crc.pt", "builtin_older.pt"}) {
    INFO(name);
    const Decoded tree = decoded(test::sample_file(name));
    REQUIRE(tree.has_value());
    CHECK(*tree == sample_tree());
  }
}

TEST_CASE("builtin_archive: what is left to torch.load") {
  for (const char* name : {"plain.pt", "objects.pt", "two.pt", "quantized.pt", "legacy.pt", "builtin_big_endian.pt",
                           "builtin_compressed.pt", "builtin_shared.pt"}) {
    INFO(name);
    CHECK_FALSE(decoded(test::sample_file(name)).has_value());
  }
  CHECK_FALSE(decoded("").has_value());
  CHECK_FALSE(decoded("PK\3").has_value());
  CHECK_FALSE(decoded("no archive").has_value());
  CHECK_FALSE(decoded(test::zip_of({{"archive/data.txt", whole("N")}})).has_value());
  CHECK(unpickled("N").has_value());
  CHECK_FALSE(unpickled("\x8A\x09" + std::string(8, '\0') + "\1").has_value());  // 2**64
  CHECK_FALSE(unpickled("\x8A\x09" + little<int64_t>(-1) + '\0').has_value());   // 2**64 - 1
  CHECK(unpickled("\x8A\x09" + little<int64_t>(-1) + "\xFF") == Decoded(integer(-1)));
  CHECK_FALSE(unpickled(text("\xED\xA0\x80")).has_value());  // a surrogate
  CHECK_FALSE(unpickled("X\1\0\0").has_value());             // cut off
  CHECK_FALSE(unpickled("}]Ns").has_value());                // a list as a key
  CHECK_FALSE(unpickled("}]\x85Ns").has_value());            // a list within a key
  CHECK_FALSE(unpickled(text("x") + "Q").has_value());       // a persistent id
  CHECK_FALSE(unpickled(global("_codecs", "encode")).has_value());
  CHECK_FALSE(unpickled(call(global("os", "system"), tuple({text("id")}))).has_value());
  CHECK_FALSE(decoded(archive_of(whole("N") + "N")).has_value());  // bytes behind the pickle
}

TEST_CASE("builtin_archive: bytes are a call of one function, with one encoding, in Latin-1") {
  const auto encode = [](const std::string& args) { return call(global("_codecs", "encode"), args); };
  const std::string latin1 = text("latin1");
  CHECK(unpickled(encode(tuple({text("a\xC3\xBF"), latin1}))) == Decoded(string("a\xFF", Kind::kBytes)));
  CHECK(unpickled(encode(tuple({text(""), latin1}))) == Decoded(string("", Kind::kBytes)));
  CHECK_FALSE(unpickled(encode(tuple({text("\xC4\x80"), latin1}))).has_value());  // U+0100
  CHECK_FALSE(unpickled(encode(tuple({text("a"), text("utf-8")}))).has_value());
  CHECK_FALSE(unpickled(encode(tuple({text("a")}))).has_value());
  CHECK_FALSE(unpickled(encode(tuple({text("a"), latin1, latin1}))).has_value());
  CHECK_FALSE(unpickled(encode(tuple({number(1), latin1}))).has_value());
  CHECK_FALSE(unpickled(encode(tuple({text("a"), latin1})) + "}b").has_value());
  CHECK_FALSE(unpickled(object(global("_codecs", "encode"), "N")).has_value());
  // Functions of other names.
  CHECK_FALSE(unpickled(call(global("codecs", "encode"), tuple({text("a"), latin1}))).has_value());
  CHECK_FALSE(unpickled(call(global("_codecs", "decode"), tuple({text("a"), latin1}))).has_value());
}

TEST_CASE("builtin_archive: a list or dict in two places is one, so it is left; what cannot change may be copied") {
  CHECK_FALSE(unpickled("](]q\1h\1e").has_value());
  CHECK_FALSE(unpickled("](}q\1h\1e").has_value());
  CHECK_FALSE(unpickled("(]q\1\x85h\1t").has_value());
  CHECK_FALSE(unpickled("](]\x85q\1h\1e").has_value());  // in a tuple that holds it
  CHECK_FALSE(unpickled("]q\1h\1a").has_value());        // holds itself
  CHECK(unpickled("](]q\1]e").has_value());
  const Decoded pair = unpickled("](K\1\x85q\1h\1e");
  const Tree one = holding(Kind::kTuple, {integer(1)});
  CHECK(pair == Decoded(holding(Kind::kList, {one, one})));
  CHECK(unpickled("](" + text("x") + "q\1h\1e").has_value());
  // Each tuple holds the previous tuple twice: small as a pickle, too large for any memory as a tree.
  std::string laughs = ")q" + std::string(1, '\0');
  for (char level = 1; level < 60; ++level) {
    laughs += std::string("h") + static_cast<char>(level - 1) + "h" + static_cast<char>(level - 1) + "\x86q" + level;
  }
  CHECK_FALSE(unpickled(laughs).has_value());
}

TEST_CASE("builtin_archive: of equal keys all are kept, in order, for Python to choose from") {
  const Tree tree =
      holding(Kind::kDict, {integer(1), string("a"), leaf(Kind::kTrue), string("b"), real(1), string("c")});
  CHECK(decoded(encode_builtin_archive(tree)) == Decoded(tree));
}

TEST_CASE("builtin_archive: depth and size are bounded") {
  Tree nested;
  for (int depth = 0; depth < kMaxTreeDepth; ++depth) nested = holding(Kind::kList, {nested});
  CHECK(decoded(encode_builtin_archive(nested)) == Decoded(nested));
  CHECK_FALSE(decoded(encode_builtin_archive(holding(Kind::kTuple, {nested}))).has_value());
  CHECK_FALSE(unpickled(repeated("]", 300000) + repeated("a", 299999)).has_value());
  const size_t most = kMaxBuiltinPickleBytes - 8;  // protocol, opcode and length, STOP
  CHECK(decoded(encode_builtin_archive(string(std::string(most, 'x')))).has_value());
  CHECK_FALSE(decoded(encode_builtin_archive(string(std::string(most + 1, 'x')))).has_value());
}

TEST_CASE("builtin_archive: no value takes more of a pickle than was said") {
  const auto pickled_bytes = [](const Tree& tree) {
    PickleWriter writer(2);
    writer.tree(tree);
    return static_cast<int64_t>(writer.finish().size()) - 3;  // protocol, STOP
  };
  const std::string high(1000, '\xFF');
  CHECK(pickled_bytes(string(high, Kind::kBytes)) <= most_pickled_bytes(Kind::kBytes, 1000));
  CHECK(pickled_bytes(string("x")) <= most_pickled_bytes(Kind::kString, 1));
  CHECK(pickled_bytes(integer(int64_t{1} << 40)) <= most_pickled_bytes(Kind::kInt));
  CHECK(pickled_bytes(real(1)) <= most_pickled_bytes(Kind::kFloat));
  for (const Kind kind : {Kind::kList, Kind::kTuple, Kind::kDict}) {
    CHECK(pickled_bytes(holding(kind, {})) <= most_pickled_bytes(kind));
    CHECK(pickled_bytes(holding(kind, {Tree(), Tree()})) <= most_pickled_bytes(kind) + 2);
  }
}

TEST_CASE("builtin_archive: entries begin at multiples of 64, and their CRCs are right") {
  const std::string archive = encode_builtin_archive(sample_tree());
  const ReadBytes read = [&](int64_t offset, int64_t size) -> base::Result<std::string> {
    return archive.substr(static_cast<size_t>(offset), static_cast<size_t>(size));
  };
  ArchiveReader reader(static_cast<int64_t>(archive.size()), read);
  const auto directory = test::value_of(read_zip_directory(&reader));
  REQUIRE(directory.has_value());
  REQUIRE(directory->entries.size() == 3);
  CHECK(directory->entries[0].name == "archive/data.pkl");
  CHECK(directory->entries[1].name == "archive/byteorder");
  CHECK(directory->entries[2].name == "archive/version");
  for (const ZipEntry& entry : directory->entries) {
    const int64_t offset = test::value_of(content_offset(entry, *directory, &reader));
    CHECK(offset % 64 == 0);
    CHECK(entry.crc == base::crc32(0, archive.data() + offset, static_cast<size_t>(entry.bytes)));
  }
}

TEST_CASE("zip_directory: a damaged byte of a directory is refused, or changes nothing that counts") {
  const std::string archive = test::sample_file("builtin.pt");
  ArchiveReader whole_reader(archive);
  const auto wanted = test::value_of(read_zip_directory(&whole_reader));
  REQUIRE(wanted.has_value());
  int refused = 0;
  for (auto at = static_cast<size_t>(wanted->begin); at < archive.size(); ++at) {
    std::string damaged = archive;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    ArchiveReader reader(damaged);
    const auto directory = read_zip_directory(&reader);
    const auto is_its_header = [&](const ZipEntry& entry) { return check_header(entry, &reader).is_ok(); };
    if (!directory.is_ok() ||
        !std::all_of(directory.value()->entries.begin(), directory.value()->entries.end(), is_its_header)) {
      ++refused;
      continue;
    }
    const auto& entries = directory.value()->entries;
    REQUIRE(entries.size() == wanted->entries.size());
    for (size_t e = 0; e < entries.size(); ++e) {
      CHECK(entries[e].name == wanted->entries[e].name);
      CHECK(entries[e].header_offset == wanted->entries[e].header_offset);
      CHECK(entries[e].is_plain == wanted->entries[e].is_plain);
    }
  }
  CHECK(refused > 100);
}

TEST_CASE("builtin_archive: the bytes stay what they are") {
  const std::string archive = encode_builtin_archive(sample_tree());
  CHECK(archive.size() == 658);
  CHECK(base::crc32(0, archive.data(), archive.size()) == 0x497F0324u);
}

TEST_CASE("builtin_archive: a damaged pickle is seen by its CRC") {
  for (const std::string& archive : {test::sample_file("builtin.pt"), encode_builtin_archive(sample_tree())}) {
    std::string damaged = archive;
    const size_t at = archive.find("amsgrad");
    REQUIRE(at != archive.npos);
    damaged[at] = 'b';
    EXPECT_FAILURE(kCorrupt, "CRC of data.pkl", decode_builtin_archive(damaged));
    EXPECT_CODE(kCorrupt, decode_builtin_archive(archive.substr(0, archive.size() - 1)));
  }
}

TEST_CASE("builtin_archive: what torch.load would take for something else is nothing of ours") {
  const std::string archive = encode_builtin_archive(sample_tree());
  // torch.load looks only at the first bytes, and takes this for a bare pickle.
  CHECK_FALSE(decoded(whole("N") + archive).has_value());
  // A TorchScript program.
  CHECK_FALSE(decoded(test::zip_of({{"a/data.pkl", whole("N")}, {"a/constants.pkl", whole("N")}})).has_value());
  CHECK(decoded(test::zip_of({{"a/data.pkl", whole("N")}})).has_value());
  EXPECT_CODE(kCorrupt,
              decode_builtin_archive(test::zip_of({{"a/data.pkl", whole("N")}, {"a/data.pkl", whole("K\1")}})));
}

TEST_CASE("builtin_archive: mutated archives never crash, and what is accepted encodes to itself") {
  std::vector<std::string> samples;
  for (const char* name : {"builtin.pt", "builtin_protocol4.pt", "builtin_no_crc.pt", "builtin_shared.pt"}) {
    samples.push_back(test::sample_file(name));
  }
  test::Random random(32);
  for (int i = 0; i < 20; ++i) samples.push_back(encode_builtin_archive(test::draw_tree(&random, 4)));
  test::Mutator mutate(33, samples, std::string(kOpcodes) + "PK\1\2\3\4\5\6\7");
  int accepted = 0, left = 0, corrupt = 0;
  for (int round = 0; round < 30000; ++round) {
    const std::string& sample = samples[mutate.below(samples.size())];
    // Half of the rounds mutate only the pickle and give it a correct CRC.
    const bool is_pickle = round % 2 == 0;
    const size_t begin = sample.find('\x80'), end = sample.find("PK", begin);
    const std::string archive = is_pickle ? archive_of(mutate(sample.substr(begin, end - begin))) : mutate(sample);
    const auto result = decode_builtin_archive(archive);
    if (!result.is_ok()) {
      REQUIRE(result.status().code() == base::Code::kCorrupt);
      REQUIRE(base::is_utf8(result.status().message()));
      ++corrupt;
    } else if (!result.value().has_value()) {
      ++left;
    } else {
      ++accepted;
      const Decoded again = decoded(encode_builtin_archive(*result.value()));
      REQUIRE(again.has_value());
      REQUIRE(*again == *result.value());
    }
  }
  CHECK(accepted > 1000);
  CHECK(left > 1000);
  CHECK(corrupt > 1000);
}

}  // namespace
}  // namespace bytecheckpoint::format
