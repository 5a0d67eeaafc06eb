// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/dcp/foreign_metadata.h"

#include <string>

#include "csrc/base/utf8.h"
#include "csrc/format/manifest/metadata_file.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/make_tree.h"
#include "tests/cpp/mutate.h"
#include "tests/cpp/pickle_parts.h"
#include "tests/cpp/rounds.h"
#include "tests/cpp/sample_file.h"
#include "tests/cpp/sample_manifest.h"

namespace bytecheckpoint::format {
namespace {

using namespace test::pickled;  // NOLINT
using tensor::Dims;
using tensor::DType;

/// The properties that later code relies on without checking again.
bool is_valid(const Manifest& manifest) {
  if (!manifest.foreign.has_value()) return false;
  for (size_t i = 0; i < manifest.items.size(); ++i) {
    const Item& item = manifest.items[i];
    if (i != 0 && !(manifest.items[i - 1].fqn < item.fqn)) return false;
    if (item.ordinal >= manifest.items.size() || !base::is_utf8(item.fqn)) return false;
    if (item.is_tensor != (tensor::find_dtype(item.tensor.dtype) != nullptr)) return false;
    if (!item.is_tensor && item.chunks.size() != 1) return false;
    for (const Chunk& chunk : item.chunks) {
      const Record& record = chunk.record;
      if (!tensor::is_inside(chunk.box, item.tensor.sizes)) return false;
      if (record.kind == RecordKind::kAbsent) continue;
      int64_t end;
      if (record.kind != (item.is_tensor ? RecordKind::kForeign : RecordKind::kBytes)) return false;
      if (record.file >= manifest.files.size() || !base::checked_add(record.offset, record.bytes, &end)) return false;
    }
  }
  for (const FileEntry& file : manifest.files) {
    if (file.name.empty() || file.name[0] == '/' || ("/" + file.name + "/").find("/../") != std::string::npos) {
      return false;
    }
  }
  return true;
}

Manifest read_sample(const std::string& name) {
  Manifest manifest = test::value_of(read_foreign_metadata(test::sample_file(name)));
  CHECK(is_valid(manifest));
  return manifest;
}

const Item& item_of(const Manifest& manifest, std::string_view fqn) {
  const Item* item = manifest.find(fqn);
  REQUIRE(item != nullptr);
  return *item;
}

const std::string& file_of(const Manifest& manifest, const Chunk& chunk) {
  REQUIRE(chunk.record.kind != RecordKind::kAbsent);
  return manifest.files[chunk.record.file].name;
}

/// Returns the value of a key of a dict.
Tree value_of(const Tree& dict, std::string_view key) {
  REQUIRE((dict.kind() == Tree::Kind::kDict));
  const std::vector<Tree> children = test::children_of(dict);
  for (size_t i = 0; i < children.size(); i += 2) {
    if (children[i] == test::string(key)) return children[i + 1];
  }
  FAIL("no key ", std::string(key));
  return dict;
}

// --- metadata that stock DCP wrote

TEST_CASE("foreign_metadata: a stock checkpoint of two ranks, in three protocols") {
  for (const char* name : {"stock.metadata", "protocol2.metadata", "protocol5.metadata"}) {
    const Manifest manifest = read_sample(name);
    REQUIRE(manifest.items.size() == 7);
    REQUIRE(manifest.files.size() == 2);
    const Item& rows = item_of(manifest, "model.rows");
    CHECK(rows.is_tensor);
    CHECK(rows.ordinal == 0);
    CHECK((rows.tensor.dtype == DType::kBFloat16));
    CHECK((rows.tensor.sizes == Dims{5, 4}));
    CHECK_FALSE(rows.tensor.requires_grad);
    REQUIRE(rows.chunks.size() == 2);
    CHECK((rows.chunks[0].box == tensor::Box{{0, 0}, {3, 4}}));
    CHECK((rows.chunks[1].box == tensor::Box{{3, 0}, {2, 4}}));
    CHECK((rows.chunks[1].record.kind == RecordKind::kForeign));
    CHECK(file_of(manifest, rows.chunks[0]) == "__0_0.distcp");
    CHECK(file_of(manifest, rows.chunks[1]) == "__1_0.distcp");
    CHECK(rows.chunks[0].record.offset == 0);
    CHECK(rows.chunks[0].record.bytes == 1577);
    const Item& step = item_of(manifest, "step");
    CHECK_FALSE(step.is_tensor);
    CHECK(step.ordinal == 6);
    CHECK((step.chunks[0].record.kind == RecordKind::kBytes));
    CHECK(step.chunks[0].record.bytes == 1261);
    const Item& unicode = item_of(manifest, "model.\u00e9\U0001f600");
    CHECK((unicode.tensor.sizes == Dims{2, 0}));
    CHECK((unicode.tensor.dtype == DType::kInt8));
    const Item& scalar = item_of(manifest, "model.scalar");
    CHECK(scalar.tensor.sizes.empty());
    CHECK(scalar.chunks[0].record.offset == 5360);

    const Tree path = value_of(manifest.planner_data, "optimizer.0.lr");
    CHECK(path == test::holding(Tree::Kind::kTuple, {test::string("optimizer"), test::integer(0), test::string("lr")}));
    const ForeignMeta& meta = *manifest.foreign;
    CHECK(meta.version == test::string("1.0.0"));
    CHECK(meta.checkpoint_id_is_path);
    CHECK(value_of(meta.storage_meta, "checkpoint_id") == test::string("stock"));
    CHECK(value_of(meta.storage_meta, "save_id").bytes().size() == kTextHeadBytes + 36);
    CHECK((value_of(meta.storage_meta, "load_id").kind() == Tree::Kind::kNone));
    CHECK((value_of(meta.storage_meta, "modules").kind() == Tree::Kind::kList));
    CHECK(manifest.checkpoint_id == "stock");
    CHECK(manifest.save_id == base::Id{});
  }
}

TEST_CASE("foreign_metadata: an older version's, without storage meta, version and planner data") {
  const Manifest manifest = read_sample("older.metadata");
  const Item& w = item_of(manifest, "w");
  CHECK((w.tensor.dtype == DType::kFloat16));
  CHECK(w.tensor.requires_grad);
  CHECK(w.tensor.memory_format == 2);
  CHECK(file_of(manifest, w.chunks[0]) == "sub/__0_0.distcp");
  CHECK(file_of(manifest, w.chunks[1]) == "__1_0.distcp");
  CHECK(w.chunks[1].record.offset == 100);
  CHECK(item_of(manifest, "extra").chunks[0].record.offset == 60);
  CHECK((manifest.foreign->storage_meta.kind() == Tree::Kind::kNone));
  CHECK((manifest.foreign->version.kind() == Tree::Kind::kNone));
  CHECK((manifest.planner_data.kind() == Tree::Kind::kNone));
  CHECK(manifest.checkpoint_id.empty());
}

TEST_CASE("foreign_metadata: a storage info of another module, with a field more") {
  const Manifest manifest = read_sample("olmo.metadata");
  const Chunk& chunk = item_of(manifest, "a").chunks[0];
  CHECK(file_of(manifest, chunk) == "__0_3.distcp");
  CHECK(chunk.record.offset == 1);
  CHECK(chunk.record.bytes == 2);
  CHECK(manifest.checkpoint_id == "s3://bucket/step7");
  CHECK_FALSE(manifest.foreign->checkpoint_id_is_path);
}

TEST_CASE("foreign_metadata: every dtype of torch, every flag, every builtin type; chunks that have no place") {
  const Manifest manifest = read_sample("dtypes.metadata");
  REQUIRE(manifest.items.size() == tensor::kLastDType - 1);
  for (uint8_t code = 1; code <= tensor::kLastDType; ++code) {
    const tensor::DTypeInfo& info = *tensor::find_dtype(code);
    if (info.dtype == tensor::DType::kBComplex32) continue;  // younger than the torch that wrote the sample
    const Item& item = item_of(manifest, base::text("torch.", info.name));
    CHECK((item.tensor.dtype == info.dtype));
    CHECK(item.tensor.requires_grad == (item.ordinal % 2 == 1));
    CHECK(item.tensor.memory_format == item.ordinal % 3);
    CHECK(item.tensor.pin_memory == (item.ordinal % 5 == 0));
    CHECK((item.chunks[0].record.kind == RecordKind::kAbsent));
  }
  // The planner data that make_data.py wrote.
  using Kind = Tree::Kind;
  const Tree pair = test::holding(Kind::kTuple, {test::integer(1), test::holding(Kind::kTuple, {test::integer(2)})});
  CHECK(value_of(manifest.planner_data, "kinds") ==
        test::holding(Kind::kList,
                      {test::leaf(Kind::kNone), test::leaf(Kind::kTrue), test::leaf(Kind::kFalse), test::integer(-1),
                       test::integer(int64_t{1} << 40), test::integer(INT64_MIN), test::real(0.5), test::string("text"),
                       test::string(std::string("\0\xFF", 2), Kind::kBytes),
                       test::string(std::string(300, 'x'), Kind::kBytes), pair}));
  CHECK(manifest.checkpoint_id == "/ckpt/step-7");
  CHECK(value_of(manifest.foreign->storage_meta, "modules") == test::holding(Tree::Kind::kList, {test::string("m")}));
}

TEST_CASE("foreign_metadata: what stream extensions or other layouts made is refused by name") {
  EXPECT_FAILURE(kUnsupported, "'z': record in '__0_0.distcp': it was transformed by stream extensions",
                 read_foreign_metadata(test::sample_file("transformed.metadata")));
  EXPECT_FAILURE(kUnsupported, "'s': layout torch.sparse_coo",
                 read_foreign_metadata(test::sample_file("sparse.metadata")));
}

TEST_CASE("foreign_metadata: the pickle that we write beside our manifest says the same") {
  Manifest ours = test::sample_manifest();
  const std::string pickle = metadata_pickle(ours);
  const Manifest read = test::value_of(read_foreign_metadata(pickle));
  CHECK(is_valid(read));
  CHECK(read.planner_data == ours.planner_data);
  CHECK(read.checkpoint_id == ours.checkpoint_id);
  REQUIRE(read.items.size() == ours.items.size());
  for (size_t i = 0; i < ours.items.size(); ++i) {
    const Item &a = ours.items[i], &b = read.items[i];
    CHECK(a.fqn == b.fqn);
    CHECK(a.ordinal == b.ordinal);
    CHECK(a.tensor.requires_grad == b.tensor.requires_grad);
    CHECK(a.tensor.pin_memory == b.tensor.pin_memory);
    REQUIRE(a.chunks.size() == b.chunks.size());
    for (size_t c = 0; c < a.chunks.size(); ++c) {
      CHECK((a.chunks[c].box == b.chunks[c].box));
      CHECK(ours.files[a.chunks[c].record.file].name == file_of(read, b.chunks[c]));
      CHECK(a.chunks[c].record.offset == b.chunks[c].record.offset);
      CHECK(a.chunks[c].record.bytes == b.chunks[c].record.bytes);
    }
  }
  EXPECT_FAILURE(kCorrupt, base::text("ends at byte ", pickle.size()),
                 read_foreign_metadata(encode_metadata_file(ours)));
  EXPECT_CODE(kCorrupt, read_foreign_metadata(pickle + "."));
}

// --- metadata put together by hand

const std::string kModule = "torch.distributed.checkpoint.metadata";

std::string dcp(const char* name) {
  return global(kModule, name);
}

std::string size(std::initializer_list<int64_t> sizes) {
  std::string numbers = "(";
  for (int64_t s : sizes) numbers += number(s);
  return call(global("torch", "Size"), tuple({numbers + "t"}));
}

std::string chunk(std::initializer_list<int64_t> offsets, std::initializer_list<int64_t> sizes) {
  return object(dcp("ChunkStorageMetadata"), dict({{"offsets", size(offsets)}, {"sizes", size(sizes)}}));
}

std::string layout(const char* name = "torch.strided") {
  return call(global("torch.serialization", "_get_layout"), tuple({text(name)}));
}

std::string memory_format(int64_t encoding = 0) {
  return call(dcp("_MEM_FORMAT_ENCODING"), tuple({number(encoding)}));
}

std::string properties() {
  return object(dcp("TensorProperties"),
                tuple({global("torch", "float32"), layout(), "\x89", memory_format(), "\x89"}));
}

std::string tensor_entry(const std::string& shape, const std::string& chunks) {
  return object(dcp("TensorStorageMetadata"),
                dict({{"properties", properties()}, {"size", shape}, {"chunks", chunks}}));
}

std::string index(const char* fqn, const std::string& offset, const std::string& hint = "N") {
  return object(dcp("MetadataIndex"), dict({{"fqn", text(fqn)}, {"index", hint}, {"offset", offset}}));
}

std::string info(const std::string& name, int64_t offset = 0, int64_t length = 1) {
  return object(global("any.module", "_StorageInfo"),
                dict({{"relative_path", text(name)}, {"offset", number(offset)}, {"length", number(length)}}));
}

/// A complete metadata pickle. `storage` alternates keys and values.
std::string metadata(const std::string& entries, std::initializer_list<std::string> storage,
                     const std::string& planner_data = "N") {
  std::string places = "}(";
  for (const std::string& part : storage) places += part;
  return whole(
      object(dcp("Metadata"),
             dict({{"state_dict_metadata", entries}, {"planner_data", planner_data}, {"storage_data", places + "u"}})));
}

/// One tensor `w` of shape [4] in chunks of 2.
std::string two_chunks() {
  return dict({{"w", tensor_entry(size({4}), list({chunk({0}, {2}), chunk({2}, {2})}))}});
}

/// Offset of the record of each chunk of `w`, or -1 if it has none.
std::vector<int64_t> offsets_of(const std::string& pickle) {
  const Manifest manifest = test::value_of(read_foreign_metadata(pickle));
  CHECK(is_valid(manifest));
  std::vector<int64_t> offsets;
  for (const Chunk& c : item_of(manifest, "w").chunks) {
    offsets.push_back(c.record.kind == RecordKind::kAbsent ? -1 : c.record.offset);
  }
  return offsets;
}

using Offsets = std::vector<int64_t>;

TEST_CASE("foreign_metadata: places are found by offset; the last of equal ones counts") {
  CHECK(offsets_of(metadata(two_chunks(), {})) == Offsets{-1, -1});
  CHECK(offsets_of(metadata(two_chunks(), {index("w", size({2})), info("a", 7)})) == Offsets{-1, 7});
  CHECK(offsets_of(metadata(two_chunks(), {index("w", size({2})), info("a", 7), index("w", size({0})), info("a", 8),
                                           index("w", size({2})), info("a", 9)})) == Offsets{8, 9});
  // Other names, other offsets and offsets with other numbers of dims do not belong to this tensor.
  CHECK(offsets_of(metadata(two_chunks(), {index("v", size({0})), info("a", 7), index("w", size({1})), info("a", 7),
                                           index("w", size({0, 0})), info("a", 7)})) == Offsets{-1, -1});
  // A plain tuple or list instead of torch.Size.
  CHECK(offsets_of(metadata(two_chunks(), {index("w", tuple({number(2)})), info("a", 7), index("w", list({number(0)})),
                                           info("a", 8)})) == Offsets{8, 7});
}

TEST_CASE("foreign_metadata: chunks that begin at the same place share it, as empty ones do") {
  const std::string entry = tensor_entry(size({1}), list({chunk({0}, {1}), chunk({1}, {0}), chunk({1}, {0})}));
  CHECK(offsets_of(metadata(dict({{"w", entry}}), {index("w", size({0})), info("a", 3), index("w", size({1})),
                                                   info("a", 4)})) == Offsets{3, 4, 4});
}

TEST_CASE("foreign_metadata: without offset the index says which chunk, or there is but one") {
  CHECK(offsets_of(metadata(two_chunks(), {index("w", "N", number(1)), info("a", 7)})) == Offsets{-1, 7});
  CHECK(offsets_of(metadata(two_chunks(), {index("w", "N"), info("a", 7)})) == Offsets{-1, -1});
  CHECK(offsets_of(metadata(two_chunks(), {index("w", "N", number(2)), info("a", 7)})) == Offsets{-1, -1});
  CHECK(offsets_of(metadata(two_chunks(), {index("w", "N", number(-1)), info("a", 7)})) == Offsets{-1, -1});
  const std::string one = dict({{"w", tensor_entry(size({4}), list({chunk({0}, {4})}))}});
  CHECK(offsets_of(metadata(one, {index("w", "N"), info("a", 7)})) == Offsets{7});
  // An exact offset takes precedence.
  CHECK(offsets_of(metadata(one, {index("w", size({0})), info("a", 8), index("w", "N"), info("a", 7)})) == Offsets{8});
}

TEST_CASE("foreign_metadata: file names stay inside the checkpoint") {
  const auto with_name = [](const std::string& name) {
    return read_foreign_metadata(metadata(two_chunks(), {index("w", size({0})), info(name)}));
  };
  for (const char* good : {"a", "a/b/c.distcp", "..a", "a../b", "...", "a\\..\\b", "C:\\x", " ", "./a"}) {
    EXPECT_OK(with_name(good));
  }
  for (const char* bad : {"", "/", "/etc/passwd", "..", "../a", "a/..", "a/../b", "a/b/..", "./.."}) {
    EXPECT_FAILURE(kCorrupt, base::text("'w': file name '", bad, "'"), with_name(bad));
  }
  EXPECT_FAILURE(kCorrupt, "NUL", with_name(std::string("a\0b", 3)));
}

TEST_CASE("foreign_metadata: offsets and lengths are sane") {
  const auto with_range = [](int64_t offset, int64_t length) {
    return read_foreign_metadata(metadata(two_chunks(), {index("w", size({0})), info("f", offset, length)}));
  };
  EXPECT_OK(with_range(0, 0));
  EXPECT_OK(with_range(INT64_MAX, 0));
  EXPECT_FAILURE(kCorrupt, "'w': record in 'f': impossible offset or length", with_range(-1, 4));
  EXPECT_CODE(kCorrupt, with_range(4, -1));
  EXPECT_CODE(kCorrupt, with_range(INT64_MAX, 1));
}

TEST_CASE("foreign_metadata: shapes and boxes are sane") {
  const auto with_entry = [](const std::string& entry) {
    return read_foreign_metadata(metadata(dict({{"w", entry}}), {}));
  };
  EXPECT_OK(with_entry(tensor_entry(size({}), list({chunk({}, {})}))));
  EXPECT_OK(with_entry(tensor_entry(size({0, INT64_MAX}), list({}))));
  EXPECT_FAILURE(kCorrupt, "'w': chunk at [3] of [2] outside shape [4]",
                 with_entry(tensor_entry(size({4}), list({chunk({3}, {2})}))));
  EXPECT_CODE(kCorrupt, with_entry(tensor_entry(size({4}), list({chunk({-1}, {2})}))));
  EXPECT_CODE(kCorrupt, with_entry(tensor_entry(size({4}), list({chunk({0, 0}, {2, 2})}))));
  EXPECT_CODE(kCorrupt, with_entry(tensor_entry(size({4}), list({chunk({INT64_MAX}, {INT64_MAX})}))));
  EXPECT_FAILURE(kCorrupt, "impossible shape [-4]", with_entry(tensor_entry(size({-4}), list({}))));
  EXPECT_FAILURE(kCorrupt, "impossible shape", with_entry(tensor_entry(size({INT64_MAX, 2}), list({}))));
  EXPECT_FAILURE(kCorrupt, "256 dims", with_entry(tensor_entry("(" + repeated("K\1", 256) + "t", list({}))));
  EXPECT_OK(with_entry(tensor_entry("(" + repeated("K\1", 255) + "t", list({}))));
  EXPECT_FAILURE(kCorrupt, "a dim is not an int", with_entry(tensor_entry(tuple({"\x88"}), list({}))));
}

TEST_CASE("foreign_metadata: objects of other types than DCP's are refused, each by key") {
  const auto with_entries = [](const std::string& entries) { return read_foreign_metadata(metadata(entries, {})); };
  const auto with_properties = [&](std::initializer_list<std::string> state) {
    const std::string props = object(dcp("TensorProperties"), tuple(state));
    return with_entries(dict({{"k", object(dcp("TensorStorageMetadata"),
                                           dict({{"properties", props}, {"size", size({})}, {"chunks", list({})}}))}}));
  };
  const std::string dtype = global("torch", "float32"), off = "\x89";
  EXPECT_OK(with_properties({dtype, layout(), off, memory_format(2), off}));
  EXPECT_FAILURE(kCorrupt, "'k': the properties have no dtype",
                 with_properties({"N", layout(), off, memory_format(), off}));
  EXPECT_FAILURE(kCorrupt, "no dtype", with_properties({global("torch", "Size"), layout(), off, memory_format(), off}));
  EXPECT_FAILURE(kCorrupt, "no layout", with_properties({dtype, "N", off, memory_format(), off}));
  EXPECT_FAILURE(kCorrupt, "no memory format", with_properties({dtype, layout(), off, memory_format(3), off}));
  EXPECT_FAILURE(kCorrupt, "a flag of the properties is not a bool",
                 with_properties({dtype, layout(), "K\1", memory_format(), off}));
  EXPECT_FAILURE(kCorrupt, "five", with_properties({dtype, layout(), off, memory_format()}));
  EXPECT_FAILURE(kUnsupported, "global 'torch.float33'", with_properties({global("torch", "float33")}));
  EXPECT_FAILURE(kCorrupt, "'k': not a TensorStorageMetadata", with_entries(dict({{"k", "N"}})));
  EXPECT_FAILURE(kCorrupt, "'k': not a", with_entries(dict({{"k", object(dcp("Metadata"), "}")}})));
  EXPECT_FAILURE(kCorrupt, "'k': the properties are not a TensorProperties",
                 with_entries(dict({{"k", object(dcp("TensorStorageMetadata"), "}")}})));
  EXPECT_FAILURE(kCorrupt, "key 0 of the state dict: not a str", with_entries("}K\1Ns"));
  EXPECT_FAILURE(
      kCorrupt, "'k': the state dict has this key twice",
      with_entries(dict({{"k", dcp("BytesStorageMetadata") + ")\x81"}, {"k", dcp("BytesStorageMetadata") + ")\x81"}})));
  EXPECT_FAILURE(kCorrupt, "metadata of the state dict: not a dict", with_entries("N"));
  EXPECT_FAILURE(kCorrupt, "not a Metadata", read_foreign_metadata(whole("N")));
  EXPECT_FAILURE(kCorrupt, "not a Metadata", read_foreign_metadata(whole(object(dcp("MetadataIndex"), "}"))));
  EXPECT_FAILURE(kCorrupt, "state is not a dict", read_foreign_metadata(whole(object(dcp("Metadata"), "K\1"))));
  EXPECT_FAILURE(kUnsupported, "not a MetadataIndex",
                 read_foreign_metadata(metadata(two_chunks(), {text("w"), info("a")})));
  EXPECT_FAILURE(kUnsupported, "'w': the storage data are not a _StorageInfo",
                 read_foreign_metadata(metadata(two_chunks(), {index("w", size({0})), text("a")})));
}

TEST_CASE("foreign_metadata: nothing but DCP's own globals may be named, wherever they stand") {
  const std::string evil = call(global("posix", "system"), tuple({text("true")}));
  EXPECT_FAILURE(kUnsupported, "global 'posix.system' is not allowed", read_foreign_metadata(whole(evil)));
  EXPECT_FAILURE(kUnsupported, "metadata: pickle: ", read_foreign_metadata(metadata(two_chunks(), {}, evil)));
  EXPECT_CODE(kUnsupported, read_foreign_metadata(metadata(dict({{"k", evil}}), {})));
  for (const char* name : {"eval", "exec", "getattr", "__import__", "dict", "set"}) {
    EXPECT_CODE(kUnsupported, read_foreign_metadata(whole(global("builtins", name))));
  }
  EXPECT_CODE(kUnsupported, read_foreign_metadata(whole(global("collections", "OrderedDict"))));
  EXPECT_CODE(kUnsupported, read_foreign_metadata(whole(global("torch", "load"))));
  EXPECT_CODE(kUnsupported, read_foreign_metadata(whole(global("torch.hub", "float32"))));
  EXPECT_CODE(kUnsupported, read_foreign_metadata(whole(global(kModule, "torch.load"))));
  EXPECT_FAILURE(kUnsupported, "BINPERSID", read_foreign_metadata(whole("NQ")));
}

TEST_CASE("foreign_metadata: planner data are of builtin types") {
  const auto with_planner_data = [](const std::string& value) {
    return read_foreign_metadata(metadata(two_chunks(), {}, value));
  };
  CHECK((test::value_of(with_planner_data(tuple({"N"}))).planner_data.kind() == Tree::Kind::kTuple));
  EXPECT_FAILURE(kUnsupported, "planner data", with_planner_data(list({size({1})})));
  EXPECT_FAILURE(kCorrupt, "planner data", with_planner_data("]q\1h\1a"));
  EXPECT_FAILURE(kCorrupt, "planner data", with_planner_data(repeated("(", 200000) + repeated("t", 200000)));
}

TEST_CASE("foreign_metadata: paths become strings, as pathlib joins them") {
  const auto id_of = [](const char* module, const char* type, const std::string& parts) {
    const std::string meta = object(dcp("StorageMeta"), dict({{"checkpoint_id", call(global(module, type), parts)}}));
    const std::string pickle =
        whole(object(dcp("Metadata"), dict({{"state_dict_metadata", "}"}, {"storage_meta", meta}})));
    const Manifest manifest = test::value_of(read_foreign_metadata(pickle));
    CHECK(manifest.foreign->checkpoint_id_is_path);
    return manifest.checkpoint_id;
  };
  CHECK(id_of("pathlib", "PosixPath", tuple({text("/"), text("a"), text("b")})) == "/a/b");
  CHECK(id_of("pathlib._local", "PosixPath", tuple({text("/a/b")})) == "/a/b");
  CHECK(id_of("pathlib", "PurePosixPath", tuple({text("a"), text("b")})) == "a/b");
  CHECK(id_of("pathlib", "PosixPath", tuple({text("a"), text("/b")})) == "/b");
  CHECK(id_of("pathlib", "PosixPath", ")") == ".");
  CHECK(id_of("pathlib", "WindowsPath", tuple({text("C:\\"), text("a"), text("b")})) == "C:\\a\\b");
  CHECK(id_of("pathlib._local", "PureWindowsPath", tuple({text("a"), text("b")})) == "a\\b");
}

// --- input that tries to grow large

TEST_CASE("foreign_metadata: what is shared by many keys is not multiplied without end") {
  // A thousand keys share an entry of a thousand chunks.
  const std::string chunks = "](" + chunk({0}, {2}) + put(0) + repeated(get(0), 999) + "e";
  std::string entries = "}(" + text("0") + tensor_entry(size({4}), chunks) + put(1);
  for (int i = 1; i < 1000; ++i) entries += text(std::to_string(i)) + get(1);
  EXPECT_FAILURE(kCorrupt, "more values", read_foreign_metadata(metadata(entries + "u", {})));
  // Many storage entries share a long name.
  const std::string name(1 << 20, 'n');
  std::string places =
      object(dcp("MetadataIndex"), "}" + text("fqn") + text(name) + put(0) + "s") + put(1) + info("a") + put(2);
  places += repeated(get(1) + get(2), 10000);
  EXPECT_FAILURE(kCorrupt, "more values", read_foreign_metadata(metadata("}", {places})));
  // Many instances share a state of many attributes.
  const std::string state = "}(" + repeated(text("a") + "N", 65) + "u";
  EXPECT_FAILURE(kCorrupt, "at most 64 attributes", read_foreign_metadata(whole(object(dcp("Metadata"), state))));
}

TEST_CASE("foreign_metadata: objects that hold themselves are just objects") {
  const std::string self = dcp("Metadata") + ")\x81" + put(0);
  const std::string state = dict({{"state_dict_metadata", dict({{"k", get(0)}})}});
  EXPECT_FAILURE(kCorrupt, "'k': not a", read_foreign_metadata(whole(self + state + "b")));
  const std::string ignored = dict({{"state_dict_metadata", "}"}, {"other", get(0)}});
  EXPECT_OK(read_foreign_metadata(whole(self + ignored + "b")));
}

TEST_CASE("foreign_metadata: mutated metadata never crash, and what is accepted is valid") {
  std::vector<std::string> samples;
  for (const char* name : {"stock.metadata", "protocol2.metadata", "older.metadata", "olmo.metadata"}) {
    samples.push_back(test::sample_file(name));
  }
  samples.push_back(metadata(two_chunks(), {index("w", size({2})), info("a", 7)}));
  test::Mutator mutate(19, samples, std::string(kOpcodes));
  int accepted = 0, refused_by_content = 0;
  for (int round = 0; round < test::rounds(40000); ++round) {
    const std::string bytes = mutate(samples[mutate.below(samples.size())]);
    const auto manifest = read_foreign_metadata(bytes);
    if (manifest.is_ok()) {
      ++accepted;
      REQUIRE(is_valid(manifest.value()));
      continue;
    }
    const base::Code code = manifest.status().code();
    REQUIRE((code == base::Code::kCorrupt || code == base::Code::kUnsupported));
    REQUIRE(base::is_utf8(manifest.status().message()));
    if (!test::contains(manifest.status().message(), "pickle: ")) ++refused_by_content;
  }
  CHECK(accepted > test::rounds(100));
  CHECK(refused_by_content > test::rounds(100));
}

}  // namespace
}  // namespace bytecheckpoint::format
