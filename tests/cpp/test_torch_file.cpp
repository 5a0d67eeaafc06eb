// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/torch_file.h"

#include <string>
#include <vector>

#include "csrc/format/torch/builtin_archive.h"
#include "csrc/format/torch/standard_pickle.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/mutate.h"
#include "tests/cpp/rounds.h"
#include "tests/cpp/torch_file_parts.h"

namespace bytecheckpoint::format {
namespace {

using namespace test::pickled;  // NOLINT
using test::pickled_floats;
using test::torch_file_of;
using test::zip_of;
using Names = std::vector<std::string>;

base::Result<Manifest> read(const std::string& file, std::string_view root = {}) {
  return read_torch_file(
      static_cast<int64_t>(file.size()),
      [&](int64_t offset, int64_t size) -> base::Result<std::string> {
        REQUIRE(offset >= 0);
        REQUIRE(size >= 0);
        REQUIRE(offset + size <= static_cast<int64_t>(file.size()));
        return file.substr(static_cast<size_t>(offset), static_cast<size_t>(size));
      },
      root);
}

Names names_in(const Manifest& manifest) {
  Names names;
  for (const Item& item : manifest.items) names.push_back(item.fqn);
  return names;
}

const Record& record_of(const Manifest& manifest, std::string_view fqn) {
  const Item* item = manifest.find(fqn);
  REQUIRE(item != nullptr);
  return item->chunks.at(0).record;
}

std::string text_of(const Manifest& manifest, std::string_view fqn) {
  return std::string(manifest.foreign->text_of(record_of(manifest, fqn)));
}

std::string ordered_dict(const std::string& entries) {
  return call(global("collections", "OrderedDict"), ")") + "(" + entries + "u";
}

const std::string kTwelve(48, 'x');  // the content of a storage of twelve float32

TEST_CASE("torch file: names are those of flatten_state_dict, with the paths that lead back") {
  const std::string tensor = pickled_floats("0", 12, 0, {12}, {1});
  const std::string value = dict({{"model", ordered_dict(text("w") + tensor)},
                                  {"groups", list({dict({{"lr", number(3)}}), tensor})},
                                  {"betas", list({number(1), number(2)})},
                                  {"empty", "}"},
                                  {"state", "}(" + number(7) + tensor + "N" + number(1) + "\x88" + number(2) + "u"}});
  const Manifest manifest = test::value_of(read(torch_file_of(value, {{"0", kTwelve}})));
  CHECK(names_in(manifest) ==
        Names{"betas", "groups.0.lr", "groups.1", "model.w", "state.7", "state.None", "state.True"});
  CHECK(manifest.find("groups.0.lr")->ordinal == 1);
  // In the order of the file: the first is model.w, at ("model", "w").
  TreeReader in(manifest.planner_data);
  CHECK(in.next().num_children == 14);
  CHECK(in.next().text == "model.w");
  CHECK(in.next().kind == Tree::Kind::kTuple);
  CHECK(in.next().text == "model");
  CHECK(in.next().text == "w");
  CHECK(in.next().text == "groups.0.lr");
  CHECK(in.next().num_children == 3);
  CHECK(in.next().text == "groups");
  CHECK(in.next().integer == 0);
}

TEST_CASE("torch file: with a root, names stand below it, and its value may be anything") {
  const std::string tensor = pickled_floats("0", 12, 0, {12}, {1});
  const std::string of_dict = torch_file_of(dict({{"w", tensor}}), {{"0", kTwelve}});
  CHECK(names_in(test::value_of(read(of_dict))) == Names{"w"});
  const Manifest below = test::value_of(read(of_dict, "the.model"));
  CHECK(names_in(below) == Names{"the.model.w"});
  TreeReader in(below.planner_data);
  CHECK(in.next().num_children == 2);
  CHECK(in.next().text == "the.model.w");
  CHECK(in.next().num_children == 2);
  CHECK(in.next().text == "the.model");
  CHECK(in.next().text == "w");
  CHECK(names_in(test::value_of(read(torch_file_of(tensor, {{"0", kTwelve}}), "t"))) == Names{"t"});
  CHECK(names_in(test::value_of(read(torch_file_of(number(7), {}), "step"))) == Names{"step"});
  CHECK(names_in(test::value_of(read(torch_file_of("}", {}), "empty"))).empty());
  EXPECT_CODE(kUnsupported, read(torch_file_of(number(7), {})));
}

TEST_CASE("torch file: tensors of one storage, by their offsets and strides") {
  const std::string file = torch_file_of(dict({{"all", pickled_floats("0", 12, 0, {3, 4}, {4, 1})},
                                               {"tied", pickled_floats("0", 12, 0, {3, 4}, {4, 1})},
                                               {"row", pickled_floats("0", 12, 4, {4}, {1})},
                                               {"turned", pickled_floats("0", 12, 0, {4, 3}, {1, 4})},
                                               {"part", pickled_floats("0", 12, 5, {2, 2}, {4, 1})},
                                               {"none", pickled_floats("0", 12, 0, {0, 3}, {3, 1})},
                                               {"one", pickled_floats("0", 12, 11, {}, {})}}),
                                         {{"0", kTwelve}});
  const Manifest manifest = test::value_of(read(file));
  const int64_t begin = record_of(manifest, "all").data_offset;
  CHECK(file.substr(static_cast<size_t>(begin), 48) == kTwelve);
  CHECK(record_of(manifest, "all").kind == RecordKind::kTensor);
  CHECK(record_of(manifest, "tied").data_offset == begin);
  CHECK(record_of(manifest, "row").data_offset == begin + 16);
  CHECK(record_of(manifest, "row").data_bytes == 16);
  CHECK(record_of(manifest, "one").data_offset == begin + 44);
  CHECK(record_of(manifest, "none").data_bytes == 0);
  CHECK(record_of(manifest, "turned").kind == RecordKind::kStrided);
  CHECK(record_of(manifest, "turned").bytes == 48);
  const Record& part = record_of(manifest, "part");
  CHECK(part.kind == RecordKind::kStrided);
  CHECK(part.bytes == (1 * 4 + 1 + 1) * 4);
  CHECK(manifest.foreign->strides.at(static_cast<size_t>(part.data_bytes)) == tensor::Dims{4, 1});
  CHECK(manifest.foreign->crcs.size() == 1);
  CHECK(manifest.foreign->crcs[0].crc == base::crc32(0, kTwelve.data(), kTwelve.size()));
}

TEST_CASE("torch file: objects are pickles of their own, with what they share") {
  const std::string shared = "]" + put(1) + "(" + text("a long text") + put(2) + get(2) + "e";
  const std::string value = dict({{"object", tuple({shared, get(1)})}, {"again", get(1)}, {"size", number(5)}});
  const Manifest manifest = test::value_of(read(torch_file_of(value, {})));
  for (const char* name : {"object", "again", "size"}) {
    CAPTURE(name);
    const Record& record = record_of(manifest, name);
    CHECK(record.kind == RecordKind::kInline);
    const std::string archive = archive_of_pickle(text_of(manifest, name));
    CHECK(static_cast<int64_t>(archive.size()) == record.bytes);
    CHECK(test::value_of(read_standard_archive(archive)).has_value());
  }
  // One list in two places, and one text in two.
  CHECK(text_of(manifest, "object").size() < text_of(manifest, "again").size() + 12);
  CHECK(*test::value_of(decode_builtin_archive(archive_of_pickle(text_of(manifest, "size")))) ==
        *test::value_of(decode_builtin_archive(archive_of_pickle(whole(number(5))))));
}

TEST_CASE("torch file: the length of an archive is known before it is made") {
  for (size_t bytes : {0, 1, 2, 7, 60, 61, 62, 63, 64, 65, 1000, 70000}) {
    CAPTURE(bytes);
    CHECK(static_cast<int64_t>(archive_of_pickle(std::string(bytes, 'N')).size()) ==
          archive_bytes_of_pickle(static_cast<int64_t>(bytes)));
  }
}

TEST_CASE("torch file: what needs code does not keep tensors from being read") {
  const std::string tensor = pickled_floats("0", 12, 0, {12}, {1});
  const std::string broadcast = pickled_floats("0", 12, 0, {5, 2}, {0, 1});
  const std::string folded = pickled_floats("0", 12, 0, {3, 3}, {2, 1});
  const std::string file =
      torch_file_of(dict({{"args", object(global("argparse", "Namespace"), dict({{"lr", number(1)}}))},
                          {"pair", tuple({tensor, number(2)})},
                          {"sparse", call(global("torch._utils", "_rebuild_sparse_tensor"), tuple({tensor}))},
                          {"in_list", list({call(global("torch._utils", "_rebuild_qtensor"), tuple({tensor}))})},
                          {"broadcast", broadcast},
                          {"folded", folded},
                          {"keys", "}(G" + std::string(8, '\0') + tensor + "u"},
                          {"lines", call(global("a", "b"), ")") + "(" + text("x\ny") + text("z") + "\x93" + "e"},
                          {"w", tensor}}),
                    {{"0", kTwelve}});
  const Manifest manifest = test::value_of(read(file));
  CHECK(record_of(manifest, "w").kind == RecordKind::kTensor);
  CHECK(record_of(manifest, "args").kind == RecordKind::kInline);
  CHECK(text_of(manifest, "pair").find("'pair' cannot be read without torch.load: it holds tensors") == 0);
  CHECK(text_of(manifest, "sparse").find("_rebuild_sparse_tensor") != std::string::npos);
  CHECK(text_of(manifest, "in_list.0").find("_rebuild_qtensor") != std::string::npos);
  for (const char* name : {"broadcast", "folded"}) {
    CHECK(record_of(manifest, name).kind == RecordKind::kRefused);
    CHECK(manifest.find(name)->is_tensor);
    CHECK(text_of(manifest, name).find("share memory") != std::string::npos);
  }
  CHECK(text_of(manifest, "keys").find("neither a text nor a whole number") != std::string::npos);
  // Written back as a line, this name would be opcodes.
  CHECK(text_of(manifest, "lines").find("line break") != std::string::npos);
}

TEST_CASE("torch file: files that cannot be read say why") {
  const std::string tensor = pickled_floats("0", 12, 0, {12}, {1});
  const std::string legacy("\x80\x02\x8a\x0al\xfc\x9c\x46\xf9 j\xa8P\x19.", 15);
  CHECK(has_torch_magic(legacy));
  EXPECT_FAILURE(kUnsupported, "before torch 1.6", read(legacy + "more"));
  EXPECT_FAILURE(kUnsupported, "it holds a tensor, not a dict", read(torch_file_of(tensor, {{"0", kTwelve}})));
  EXPECT_FAILURE(kUnsupported, "it holds a list, not a dict", read(torch_file_of(list({tensor}), {{"0", kTwelve}})));
  EXPECT_FAILURE(kUnsupported, "an object of mine.Model",
                 read(torch_file_of(object(global("mine", "Model"), dict({{"w", tensor}})), {{"0", kTwelve}})));
  EXPECT_FAILURE(kUnsupported, "the other byte order", read(torch_file_of(dict({{"w", tensor}}), {}, "big")));
  EXPECT_FAILURE(kUnsupported, "TorchScript",
                 read(zip_of({{"m/data.pkl", whole("}")}, {"m/constants.pkl", whole("N")}})));
  EXPECT_FAILURE(kUnsupported, "not one of torch.save", read(zip_of({{"m/other", "x"}})));
  EXPECT_FAILURE(kUnsupported, "'a.b': two values",
                 read(torch_file_of(dict({{"a.b", number(1)}, {"a", dict({{"b", number(2)}})}}), {})));
}

TEST_CASE("torch file: damage is found, and named") {
  const auto with = [](const std::string& tensor, std::vector<std::pair<std::string, std::string>> storages) {
    return read(torch_file_of(dict({{"w", tensor}}), std::move(storages)));
  };
  const std::string tensor = pickled_floats("0", 12, 0, {12}, {1});
  EXPECT_FAILURE(kCorrupt, "there is no storage '0', which 'w' lies in", with(tensor, {{"1", kTwelve}}));
  EXPECT_FAILURE(kCorrupt, "two storages of the name '0'", with(tensor, {{"0", kTwelve}, {"0", kTwelve}}));
  EXPECT_FAILURE(kCorrupt, "'w': archive: storage '0' has 47 bytes", with(tensor, {{"0", kTwelve.substr(1)}}));
  EXPECT_FAILURE(kCorrupt, "outside its storage", with(pickled_floats("0", 12, 1, {12}, {1}), {{"0", kTwelve}}));
  EXPECT_FAILURE(kCorrupt, "outside its storage",
                 with(pickled_floats("0", 12, 0, {INT64_MAX / 4, 8}, {1, 1}), {{"0", kTwelve}}));
  EXPECT_FAILURE(kCorrupt, "outside its storage",
                 with(pickled_floats("0", 12, 0, {2, 2}, {INT64_MAX, 1}), {{"0", kTwelve}}));
  EXPECT_FAILURE(kCorrupt, "outside its storage", with(pickled_floats("0", 12, -1, {2}, {1}), {{"0", kTwelve}}));
  const std::string file = torch_file_of(dict({{"w", tensor}}), {{"0", kTwelve}});
  EXPECT_FAILURE(kCorrupt, "does not end as one", read(file.substr(0, file.size() - 8)));
  std::string changed = file;
  changed[70] ^= 1;  // in the pickle
  EXPECT_FAILURE(kCorrupt, "CRC of data.pkl", read(changed));
}

TEST_CASE("torch file: storages that overlap are refused") {
  std::string file =
      torch_file_of(dict({{"a", pickled_floats("0", 12, 0, {12}, {1})}, {"b", pickled_floats("1", 12, 0, {12}, {1})}}),
                    {{"0", kTwelve}, {"1", kTwelve}});
  CHECK(read(file).is_ok());
  // Let the directory say that the second storage has the header of the first.
  const size_t first = file.find("m/data/0", file.find("PK\1\2")) - 4, second = file.find("m/data/1", first) - 4;
  file.replace(second, 4, file.substr(first, 4));
  EXPECT_FAILURE(kCorrupt, "storages '0' and '1' overlap", read(file));
}

TEST_CASE("torch file: values that unfold to far more than the file") {
  std::string deep = repeated("}" + text("k"), 300) + "N" + repeated("s", 300);
  EXPECT_FAILURE(kCorrupt, "nested deeper", read(torch_file_of(deep, {})));
  const std::string itself = "}" + put(0) + "(" + text("k") + get(0) + "u";
  EXPECT_FAILURE(kCorrupt, "nested deeper", read(torch_file_of(itself, {})));
  std::string wide = "}" + put(0) + "(";
  for (int i = 0; i < 100; ++i) wide += number(i) + "N";
  wide += "u";
  for (uint32_t level = 1; level < 6; ++level) {
    std::string outer = "}" + put(level) + "(" + text("first") + wide;
    for (int i = 0; i < 100; ++i) outer += number(i) + get(level - 1);
    wide = outer + "u";
  }
  EXPECT_FAILURE(kCorrupt, "far more memory", read(torch_file_of(wide, {})));
}

TEST_CASE("torch file: any damage is found or harmless") {
  const std::string file = torch_file_of(dict({{"a", pickled_floats("0", 12, 0, {3, 4}, {4, 1})},
                                               {"b", pickled_floats("1", 12, 2, {2, 3}, {1, 3})},
                                               {"c", list({dict({{"d", tuple({text("long text"), number(3)})}})})}}),
                                         {{"0", kTwelve}, {"1", kTwelve}});
  test::Mutator mutate(7, {file}, std::string(kOpcodes) + "PK\1\2\3\4\5\6\7");
  for (int i = 0; i < test::rounds(20'000); ++i) {
    const std::string changed = mutate(file);
    const auto manifest = read(changed);
    if (!manifest.is_ok()) continue;
    for (const Item& item : manifest.value().items) {
      const Record& record = item.chunks.at(0).record;
      if (record.kind != RecordKind::kTensor && record.kind != RecordKind::kStrided) continue;
      REQUIRE(record.offset >= 0);
      REQUIRE(record.offset + record.bytes <= static_cast<int64_t>(changed.size()));
    }
  }
}

}  // namespace
}  // namespace bytecheckpoint::format
