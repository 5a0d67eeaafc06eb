// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/torch_archive.h"

#include <cstring>
#include <string>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/base/crc32.h"
#include "csrc/base/utf8.h"
#include "csrc/format/torch/zip_record.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/mutate.h"
#include "tests/cpp/pickle_parts.h"
#include "tests/cpp/random_box.h"
#include "tests/cpp/rounds.h"
#include "tests/cpp/sample_file.h"
#include "tests/cpp/zip_of.h"

namespace bytecheckpoint::format {
namespace {

using namespace test::pickled;  // NOLINT
using tensor::Dims;
using tensor::DType;
using test::zip_of;
using Archived = std::optional<ArchivedTensor>;

/// \param num_reads  If given, counts the reads.
base::Result<Archived> read(const std::string& archive, int* num_reads = nullptr) {
  const ReadBytes read_bytes = [&](int64_t offset, int64_t size) -> base::Result<std::string> {
    if (num_reads != nullptr) ++*num_reads;
    REQUIRE(offset >= 0);
    REQUIRE(size >= 0);
    REQUIRE(offset + size <= static_cast<int64_t>(archive.size()));
    return archive.substr(static_cast<size_t>(offset), static_cast<size_t>(size));
  };
  return read_tensor_archive(static_cast<int64_t>(archive.size()), read_bytes);
}

ArchivedTensor tensor_of(const std::string& archive) {
  const Archived archived = test::value_of(read(archive));
  REQUIRE(archived.has_value());
  return *archived;
}

ArchivedTensor sample(const char* name) {
  return tensor_of(test::sample_file(name));
}

/// The element at `position` of an archived tensor.
template <class Element>
Element element_at(const std::string& archive, const ArchivedTensor& t, const Dims& position) {
  int64_t index = 0;
  for (size_t d = 0; d < position.size(); ++d) index += position[d] * t.strides[d];
  const auto begin = static_cast<size_t>(t.data_offset + index * static_cast<int64_t>(sizeof(Element)));
  REQUIRE(begin + sizeof(Element) <= archive.size());
  Element element;
  std::memcpy(&element, archive.data() + begin, sizeof element);
  return element;
}

void check_crc(const std::string& archive, const ArchivedTensor& t) {
  REQUIRE(t.storage_crc.has_value());
  CHECK(*t.storage_crc == base::crc32(0, archive.data() + t.storage_offset, static_cast<size_t>(t.storage_bytes)));
}

std::string ints(std::initializer_list<int64_t> values) {
  std::string bytes = "(";
  for (int64_t value : values) bytes += number(value);
  return bytes + "t";
}

std::string storage(const std::string& type, int64_t elements, const char* key = "0") {
  return tuple({text("storage"), type, text(key), text("cpu"), number(elements)}) + "Q";
}

std::string no_hooks() {
  return call(global("collections", "OrderedDict"), ")");
}

/// The data.pkl of a float32 tensor over a storage of `elements`.
std::string pickle_of(std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides, int64_t first,
                      int64_t elements) {
  return whole(call(global("torch._utils", "_rebuild_tensor_v2"),
                    tuple({storage(global("torch", "FloatStorage"), elements), number(first), ints(sizes),
                           ints(strides), "\x89", no_hooks()})));
}

std::string archive_of(const std::string& pickle, int64_t storage_bytes) {
  return zip_of({{"a/data.pkl", pickle}, {"a/data/0", std::string(static_cast<size_t>(storage_bytes), 's')}});
}

// --- archives that torch.save wrote

TEST_CASE("torch_archive: a plain tensor of torch.save, by whatever name, protocol and alignment") {
  for (const char* name : {"plain.pt", "protocol4.pt", "named.pt", "aligned.pt", "older.pt"}) {
    CAPTURE(name);
    const std::string archive = test::sample_file(name);
    const ArchivedTensor t = tensor_of(archive);
    CHECK((t.dtype == DType::kFloat32));
    CHECK((t.sizes == Dims{4, 6}));
    CHECK((t.strides == Dims{6, 1}));
    CHECK(t.data_offset == t.storage_offset);
    CHECK(t.storage_bytes == 96);
    CHECK_FALSE(t.is_conj);
    CHECK_FALSE(t.is_neg);
    CHECK(element_at<float>(archive, t, {2, 5}) == 17);
    check_crc(archive, t);
  }
  CHECK(sample("aligned.pt").data_offset % 4096 == 0);
}

TEST_CASE("torch_archive: strides, offset, expanded, empty, scalar") {
  const std::string strided = test::sample_file("strided.pt");
  const ArchivedTensor t = tensor_of(strided);
  CHECK((t.dtype == DType::kInt16));
  CHECK((t.sizes == Dims{3, 2}));
  CHECK((t.strides == Dims{2, 6}));
  CHECK(t.data_offset == t.storage_offset + 2 * 7);
  CHECK(element_at<int16_t>(strided, t, {0, 0}) == 7);
  CHECK(element_at<int16_t>(strided, t, {2, 1}) == 17);
  check_crc(strided, t);
  const ArchivedTensor expanded = sample("expanded.pt");
  CHECK((expanded.sizes == Dims{1000, 1000, 1}));
  CHECK((expanded.strides == Dims{0, 0, 1}));
  CHECK(expanded.storage_bytes == 8);
  const ArchivedTensor empty = sample("empty.pt");
  CHECK((empty.dtype == DType::kUInt16));
  CHECK((empty.sizes == Dims{0, 3}));
  CHECK(empty.storage_bytes == 0);
  const ArchivedTensor scalar = sample("scalar.pt");
  CHECK((scalar.dtype == DType::kBool));
  CHECK(scalar.sizes.empty());
}

TEST_CASE("torch_archive: untyped storages, parameters, conjugate and negative views") {
  const ArchivedTensor float8 = sample("float8.pt");
  CHECK((float8.dtype == DType::kFloat8E4M3FN));
  CHECK((float8.sizes == Dims{4, 6}));
  CHECK(float8.storage_bytes == 24);
  const ArchivedTensor parameter = sample("parameter.pt");
  CHECK((parameter.dtype == DType::kBFloat16));
  CHECK((parameter.sizes == Dims{2}));
  const ArchivedTensor conj = sample("conj.pt");
  CHECK((conj.dtype == DType::kComplex64));
  CHECK(conj.is_conj);
  CHECK_FALSE(conj.is_neg);
  const std::string neg_archive = test::sample_file("neg.pt");
  const ArchivedTensor neg = tensor_of(neg_archive);
  CHECK((neg.dtype == DType::kFloat32));
  CHECK(neg.is_neg);
  CHECK_FALSE(neg.is_conj);
  CHECK((neg.strides == Dims{2}));
  CHECK(element_at<float>(neg_archive, neg, {1}) == -4);
}

TEST_CASE("torch_archive: a writer that was told to compute no CRCs has none") {
  const ArchivedTensor t = sample("no_crc.pt");
  CHECK_FALSE(t.storage_crc.has_value());
  CHECK((t.sizes == Dims{4, 6}));
}

TEST_CASE("torch_archive: two reads do, one if the record is small") {
  int reads = 0;
  EXPECT_OK(read(test::sample_file("plain.pt"), &reads));
  CHECK(reads == 1);
  reads = 0;
  const std::string archive = test::sample_file("large.pt");
  REQUIRE(archive.size() > 16 << 10);
  const Archived large = test::value_of(read(archive, &reads));
  CHECK(reads == 2);
  CHECK(element_at<uint8_t>(archive, *large, {19999}) == 19999 % 256);
  check_crc(archive, *large);
}

TEST_CASE("torch_archive: what is no plain tensor is left to torch.load") {
  for (const char* name : {"big_endian.pt", "compressed.pt", "quantized.pt", "sparse.pt", "two.pt", "objects.pt",
                           "attribute.pt", "meta.pt"}) {
    CAPTURE(name);
    CHECK_FALSE(test::value_of(read(test::sample_file(name))).has_value());
  }
}

TEST_CASE("torch_archive: what is no archive of torch.save is told from a damaged one") {
  EXPECT_FAILURE(kUnsupported, "not an archive of torch.save", read(test::sample_file("legacy.pt")));
  EXPECT_CODE(kUnsupported, read("\x08\0\0\0\0\0\0\0{\"w\":{}}"));
  EXPECT_CODE(kUnsupported, read(""));
  EXPECT_CODE(kUnsupported, read("PK"));
  EXPECT_CODE(kUnsupported, read(std::string(100000, 'x')));
  EXPECT_FAILURE(kUnsupported, "not one of torch.save", read(zip_of({})));
  EXPECT_FAILURE(kUnsupported, "not one of torch.save", read(zip_of({{"a/b", "c"}})));
  EXPECT_FAILURE(kCorrupt, "does not end as one", read("PK\3\4"));
  for (const char* name : {"plain.pt", "large.pt"}) {
    const std::string archive = test::sample_file(name);
    for (size_t size = 4; size < archive.size(); size += 1 + archive.size() / 1000) {
      EXPECT_CODE(kCorrupt, read(archive.substr(0, size)));
    }
  }
}

// --- our own records

TEST_CASE("torch_archive: our own records are archives of torch.save, all dtypes") {
  test::Random random(21);
  for (int round = 0; round < test::rounds(500); ++round) {
    const auto dtype = test::draw_plain_dtype(&random);
    const Dims sizes = test::draw_sizes(&random, 5, 9);
    const ZipRecord record = test::value_of(ZipRecord::layout(dtype, sizes, 4096));
    const std::string data(static_cast<size_t>(record.data_bytes()), 'd');
    const std::string archive = record.head() + data + record.tail(base::crc32(0, data.data(), data.size()));
    const ArchivedTensor t = tensor_of(archive);
    REQUIRE((t.dtype == dtype));
    REQUIRE((t.sizes == sizes));
    REQUIRE((t.strides == tensor::row_major_strides(sizes)));
    REQUIRE(t.data_offset == record.data_offset() - record.record_offset());
    REQUIRE(t.storage_bytes == record.data_bytes());
    check_crc(archive, t);
  }
}

TEST_CASE("torch_archive: beyond 4 GiB, of which only the ends are read") {
  const int64_t elements = (int64_t{5} << 30) / 4;
  const ZipRecord record = test::value_of(ZipRecord::layout(DType::kFloat32, {elements}, 0));
  const std::string head = record.head(), tail = record.tail(7);
  const int64_t bytes = record.record_bytes(), tail_begin = bytes - static_cast<int64_t>(tail.size());
  int reads = 0;
  const ReadBytes read_bytes = [&](int64_t offset, int64_t size) -> base::Result<std::string> {
    ++reads;
    REQUIRE(size < 64 << 10);
    std::string out;
    for (int64_t at = offset; at < offset + size; ++at) {
      const bool in_head = at < static_cast<int64_t>(head.size());
      out.push_back(in_head           ? head[static_cast<size_t>(at)]
                    : at < tail_begin ? 'd'
                                      : tail[static_cast<size_t>(at - tail_begin)]);
    }
    return out;
  };
  const Archived t = test::value_of(read_tensor_archive(bytes, read_bytes));
  REQUIRE(t.has_value());
  CHECK(t->storage_bytes == 4 * elements);
  CHECK(t->data_offset == record.data_offset());
  CHECK(t->storage_crc == 7);
  CHECK(reads == 2);
}

// --- archives put together by hand

TEST_CASE("torch_archive: elements lie inside their storage") {
  EXPECT_OK(read(archive_of(pickle_of({2, 3}, {3, 1}, 0, 6), 24)));
  EXPECT_OK(read(archive_of(pickle_of({2, 3}, {3, 1}, 2, 8), 32)));
  EXPECT_OK(read(archive_of(pickle_of({1, 1}, {INT64_MAX, INT64_MAX}, 0, 1), 4)));
  EXPECT_OK(read(archive_of(pickle_of({0, 5}, {INT64_MAX, 1}, 77, 0), 0)));
  const auto refused = [](std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides, int64_t first) {
    EXPECT_FAILURE(kCorrupt, "outside its storage", read(archive_of(pickle_of(sizes, strides, first, 6), 24)));
  };
  refused({2, 3}, {3, 1}, 1);
  refused({2, 3}, {4, 1}, 0);
  refused({7}, {1}, 0);
  refused({2, 3}, {3, 1}, -1);
  refused({2}, {-1}, 1);
  refused({-2}, {1}, 0);
  refused({2, 3}, {1}, 0);
  refused({}, {}, 6);
  refused({INT64_MAX, 2}, {0, 0}, 0);
  refused({INT64_MAX}, {INT64_MAX}, 0);
  refused({2, 2}, {INT64_MAX, INT64_MAX}, 0);
  refused({1}, {1}, INT64_MAX);
  refused({0}, {-1}, 0);
}

TEST_CASE("torch_archive: the storage is the one that the pickle means, and lies inside the archive") {
  const std::string pickle = pickle_of({6}, {1}, 0, 6);
  EXPECT_FAILURE(kCorrupt, "storage '0' has 20 bytes, but the pickle says 6 elements of float32",
                 read(archive_of(pickle, 20)));
  EXPECT_CODE(kCorrupt, read(archive_of(pickle, 28)));
  EXPECT_CODE(kCorrupt, read(archive_of(pickle_of({1}, {1}, 0, INT64_MAX), 4)));
  EXPECT_CODE(kCorrupt, read(archive_of(pickle_of({0}, {1}, 0, -1), 4)));
  EXPECT_FAILURE(kCorrupt, "no storage '0'",
                 read(zip_of({{"a/data.pkl", pickle}, {"b/data/0", std::string(24, 's')}})));
  const std::string data(24, 's');
  EXPECT_FAILURE(kCorrupt, "two entries with the name data/0",
                 read(zip_of({{"a/data.pkl", pickle}, {"a/data/0", data}, {"a/data/0", data}})));
  EXPECT_FAILURE(kCorrupt, "two entries with the name data.pkl",
                 read(zip_of({{"a/data.pkl", pickle}, {"a/data/0", data}, {"a/data.pkl", pickle}})));
  EXPECT_FAILURE(kCorrupt, "byteorder",
                 read(zip_of({{"a/data.pkl", pickle}, {"a/data/0", data}, {"a/byteorder", "middle"}})));
  EXPECT_OK(read(zip_of({{"a/data.pkl", pickle}, {"a/data/0", data}, {"a/byteorder", "little"}}, "a comment")));
  EXPECT_OK(read(zip_of({{"a/data.pkl", pickle}, {"a/data/0", data}}, std::string(60000, 'c'))));
}

TEST_CASE("torch_archive: the pickle is what its CRC says, and nothing follows it") {
  std::string archive = archive_of(pickle_of({6}, {1}, 0, 6), 24);
  const size_t at = archive.find("FloatStorage");
  archive[at] = 'f';
  EXPECT_FAILURE(kCorrupt, "CRC of data.pkl", read(archive));
  EXPECT_FAILURE(kCorrupt, "after the pickle", read(archive_of(pickle_of({6}, {1}, 0, 6) + "N", 24)));
  EXPECT_FAILURE(kCorrupt, "data.pkl: pickle: byte 0xff", read(archive_of(whole("\xff"), 24)));
  EXPECT_CODE(kCorrupt, read(archive_of("", 24)));
}

TEST_CASE("torch_archive: pickles of other things are opaque, whatever they name, and nothing of them is run") {
  const std::string type = global("torch", "FloatStorage");
  const std::string v2 = global("torch._utils", "_rebuild_tensor_v2");
  const std::string good = call(v2, tuple({storage(type, 1), number(0), ints({1}), ints({1}), "\x89", no_hooks()}));
  CHECK(test::value_of(read(archive_of(whole(good), 4))).has_value());
  const auto is_opaque = [](const std::string& value) {
    return !test::value_of(read(archive_of(whole(value), 4))).has_value();
  };
  const auto tensor = [&](const std::string& source, const std::string& offset, const std::string& sizes,
                          const std::string& flag, const std::string& hooks) {
    return call(v2, tuple({source, offset, sizes, ints({1}), flag, hooks}));
  };
  CHECK(is_opaque(call(global("posix", "system"), tuple({text("true")}))));
  CHECK(is_opaque(global("builtins", "eval")));
  CHECK(is_opaque("(iposix\nsystem\n"));
  CHECK(is_opaque("\x8f"));
  CHECK(is_opaque(good + "}b"));
  CHECK(is_opaque(tuple({good})));
  CHECK(is_opaque(tensor(storage(global("torch", "QInt8Storage"), 4), number(0), ints({1}), "\x89", no_hooks())));
  CHECK(is_opaque(tensor(storage(text("FloatStorage"), 1), number(0), ints({1}), "\x89", no_hooks())));
  CHECK(is_opaque(tensor("N", number(0), ints({1}), "\x89", no_hooks())));
  CHECK(is_opaque(tensor("NQ", number(0), ints({1}), "\x89", no_hooks())));
  CHECK(is_opaque(tensor(storage(type, 1), "N", ints({1}), "\x89", no_hooks())));
  CHECK(is_opaque(tensor(storage(type, 1), number(0), "N", "\x89", no_hooks())));
  CHECK(is_opaque(tensor(storage(type, 1), number(0), tuple({"N"}), "\x89", no_hooks())));
  CHECK(is_opaque(tensor(storage(type, 1), number(0), ints({1}), "K\1", no_hooks())));
  CHECK(is_opaque(tensor(storage(type, 1), number(0), ints({1}), "\x89", "N")));
  CHECK(is_opaque(tensor(storage(type, 1), number(0), ints({1}), "\x89", no_hooks() + "K\1K\1s")));
  const auto with_flags = [&](const std::string& flags) {
    return call(v2, tuple({storage(type, 1), number(0), ints({1}), ints({1}), "\x89", no_hooks(), flags}));
  };
  CHECK_FALSE(is_opaque(with_flags("N")));
  CHECK_FALSE(is_opaque(with_flags(dict({{"neg", "\x88"}}))));
  CHECK(is_opaque(with_flags(dict({{"conj", "\x88"}}))));  // of float32
  CHECK(is_opaque(with_flags(dict({{"neg", "K\1"}}))));
  CHECK(is_opaque(with_flags(dict({{"other", "\x88"}}))));
  CHECK(is_opaque(with_flags("}K\1\x88s")));
  const std::string parameter = global("torch._utils", "_rebuild_parameter");
  CHECK_FALSE(is_opaque(call(parameter, tuple({good, "\x88", no_hooks()}))));
  CHECK(is_opaque(call(parameter, tuple({call(parameter, tuple({good, "\x88", no_hooks()})), "\x88", no_hooks()}))));
  const std::string v3 = global("torch._utils", "_rebuild_tensor_v3");
  const auto untyped = [&](const std::string& source, const std::string& dtype) {
    return call(v3, tuple({source, number(0), ints({1}), ints({1}), "\x89", no_hooks(), dtype}));
  };
  const std::string bytes = storage(global("torch.storage", "UntypedStorage"), 4);
  CHECK_FALSE(is_opaque(untyped(bytes, global("torch", "float32"))));
  CHECK(is_opaque(untyped(bytes, global("torch", "quint8"))));
  CHECK(is_opaque(untyped(bytes, type)));
  CHECK(is_opaque(untyped(storage(type, 1), global("torch", "float32"))));
  CHECK(is_opaque(tensor(bytes, number(0), ints({1}), "\x89", no_hooks())));
}

TEST_CASE("torch_archive: large directories and pickles are left alone") {
  std::vector<std::pair<std::string, std::string>> entries = {{"a/data.pkl", pickle_of({6}, {1}, 0, 6)}};
  for (int i = 0; i < 2000; ++i) entries.emplace_back("a/data/" + std::to_string(i), std::string(24, 's'));
  CHECK_FALSE(test::value_of(read(zip_of(entries))).has_value());
  CHECK_FALSE(test::value_of(read(archive_of(whole(text(std::string(100000, 'x'))), 24))).has_value());
}

TEST_CASE("torch_archive: a failing read is its own fault, a short one is damage") {
  const ReadBytes failing = [](int64_t, int64_t) {
    return base::Result<std::string>(base::Status::make(base::Code::kStorage, "pread: no"));
  };
  EXPECT_FAILURE(kStorage, "pread: no", read_tensor_archive(100, failing));
  EXPECT_CODE(kCorrupt, read_tensor_archive(-1, failing));
  EXPECT_CODE(kStorage, read_tensor_archive(INT64_MAX, failing));
  const ReadBytes cut = [](int64_t, int64_t) { return base::Result<std::string>(std::string("PK")); };
  EXPECT_FAILURE(kCorrupt, "read only 2 of 100 bytes at 0", read_tensor_archive(100, cut));
}

// --- damage

/// All elements of the tensor lie in its storage, and the storage lies in the archive.
void require_inside(const ArchivedTensor& t, int64_t archive_bytes) {
  REQUIRE(t.storage_offset >= 0);
  REQUIRE(t.storage_bytes <= archive_bytes - t.storage_offset);
  REQUIRE(t.data_offset >= t.storage_offset);
  int64_t end = t.data_offset, numel = 0;
  REQUIRE(tensor::checked_numel(t.sizes, &numel));
  for (size_t d = 0; d < t.sizes.size(); ++d) {
    end += (t.sizes[d] - 1) * t.strides[d] * tensor::find_dtype(t.dtype)->itemsize_bytes;
  }
  if (numel != 0) {
    REQUIRE(end + tensor::find_dtype(t.dtype)->itemsize_bytes <= t.storage_offset + t.storage_bytes);
  }
}

TEST_CASE("torch_archive: every bit changed never crashes, and what is accepted lies inside") {
  for (const char* name : {"plain.pt", "strided.pt", "older.pt"}) {
    const std::string good = test::sample_file(name);
    for (size_t bit = 0; bit < 8 * good.size(); ++bit) {
      std::string archive = good;
      archive[bit / 8] = static_cast<char>(archive[bit / 8] ^ (1 << bit % 8));
      const auto archived = read(archive);
      if (archived.is_ok()) {
        if (archived.value().has_value()) require_inside(*archived.value(), static_cast<int64_t>(archive.size()));
        continue;
      }
      const base::Code code = archived.status().code();
      REQUIRE((code == base::Code::kCorrupt || code == base::Code::kUnsupported));
    }
  }
}

TEST_CASE("torch_archive: mutated archives never crash, and what is accepted lies inside") {
  std::vector<std::string> samples;
  for (const char* name : {"plain.pt", "strided.pt", "float8.pt", "conj.pt", "older.pt", "no_crc.pt", "large.pt"}) {
    samples.push_back(test::sample_file(name));
  }
  samples.push_back(archive_of(pickle_of({2, 3}, {3, 1}, 0, 6), 24));
  const ZipRecord huge = test::value_of(ZipRecord::layout(DType::kUInt8, {int64_t{1} << 40}, 0));
  samples.push_back(huge.head() + std::string(64, 'd') + huge.tail(7));
  test::Mutator mutate(22, samples, std::string(kOpcodes) + "PK\1\2\3\4\5\6\7");
  int tensors = 0, opaque = 0, corrupt = 0;
  for (int round = 0; round < test::rounds(60000); ++round) {
    const std::string archive = mutate(samples[mutate.below(samples.size())]);
    const auto archived = read(archive);
    if (!archived.is_ok()) {
      REQUIRE(base::is_utf8(archived.status().message()));
      corrupt += archived.status().code() == base::Code::kCorrupt ? 1 : 0;
    } else if (!archived.value().has_value()) {
      ++opaque;
    } else {
      ++tensors;
      require_inside(*archived.value(), static_cast<int64_t>(archive.size()));
    }
  }
  CHECK(tensors > test::rounds(100));
  CHECK(opaque > test::rounds(100));
  CHECK(corrupt > test::rounds(100));
}

}  // namespace
}  // namespace bytecheckpoint::format
