// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/standard_pickle.h"

#include <string>
#include <unordered_map>
#include <vector>

#include "tests/cpp/expect.h"
#include "tests/cpp/pickle_parts.h"
#include "tests/cpp/zip_of.h"

// tests/unit/test_standard_objects.py checks from Python what is made of these pickles, and that Python makes the same.

namespace bytecheckpoint::format {
namespace {

using namespace std::string_literals;  // NOLINT: many parts hold zeros
using namespace test::pickled;         // NOLINT

base::Status checked(const std::string& bytes) {
  const auto pickle = read_pickle(bytes, standard_rules());
  return pickle.is_ok() ? check_standard(pickle.value()) : pickle.status();
}
bool lets_in(const std::string& value) {
  return checked(whole(value)).is_ok();
}

std::string builtin(std::string_view name) {
  return global("builtins", name);
}
std::string bytes(std::string_view content) {
  return "C" + std::string(1, static_cast<char>(content.size())) + std::string(content);
}
std::string made(const std::string& callee, std::initializer_list<std::string> args) {
  return call(callee, tuple(args));
}

const std::string kList = list({"K\1"});
const std::string kDelta = made(global("datetime", "timedelta"), {"K\1", "K\1", "K\1"});
const std::string kDType = made(global("numpy", "dtype"), {text("i1"), "\x89", "\x88"}) +
                           tuple({"K\3", text("|"), "N", "N", "N", "K\1", "K\1", "K\1"}) + "b";

TEST_CASE("standard_pickle: each type with the arguments of its pickler, and with no others") {
  struct Case {
    const char* what;
    std::string good, bad;
  };
  const std::vector<Case> cases = {
      {"bytes", made(builtin("bytes"), {}), made(builtin("bytes"), {"K\1"})},
      {"bytearray", made(builtin("bytearray"), {bytes("a")}), made(builtin("bytearray"), {number(1LL << 40)})},
      {"bytearray of text", made(builtin("bytearray"), {text("a"), text("latin-1")}),
       made(builtin("bytearray"), {text("a"), text("utf-8")})},
      {"set", made(builtin("set"), {kList}), made(builtin("set"), {text("abc")})},
      {"frozenset", made(builtin("frozenset"), {kList}), made(builtin("frozenset"), {})},
      {"complex", made(builtin("complex"), {"G"s + std::string(8, '\0'), "G"s + std::string(8, '\0')}),
       made(builtin("complex"), {text("1j")})},
      {"range", made(builtin("range"), {"K\1", "K\2", "K\1"}), made(builtin("range"), {"K\1"})},
      {"slice", made(builtin("slice"), {"N", kList, "K\1"}), made(builtin("slice"), {"K\1"})},
      {"date", made(global("datetime", "date"), {bytes("\x07\xE4\1\1")}), made(global("datetime", "date"), {"K\1"})},
      {"datetime", made(global("datetime", "datetime"), {bytes("0123456789")}),
       made(global("datetime", "datetime"), {bytes("0123456789"), kDelta})},
      {"datetime of a zone",
       made(global("datetime", "datetime"), {bytes("0123456789"), made(global("datetime", "timezone"), {kDelta})}),
       made(global("datetime", "datetime"), {bytes("0123456789"), "N"})},
      {"timezone", made(global("datetime", "timezone"), {kDelta, text("x")}),
       made(global("datetime", "timezone"), {"K\1"})},
      {"Decimal", made(global("decimal", "Decimal"), {text("1.5")}), made(global("decimal", "Decimal"), {"K\1"})},
      {"Fraction", made(global("fractions", "Fraction"), {"K\1", "K\2"}),
       made(global("fractions", "Fraction"), {text("1e999999999")})},
      {"UUID", object(global("uuid", "UUID"), "}" + text("int") + "K\1s"),
       object(global("uuid", "UUID"), "}" + text("hex") + text("0") + "s")},
      {"Path", made(global("pathlib", "PosixPath"), {text("/"), text("a")}),
       made(global("pathlib", "PosixPath"), {text("a"), "K\1"})},
      {"Path of Python 3.13", made(global("pathlib._local", "PosixPath"), {}),
       made(global("pathlib._abc", "PosixPath"), {})},
      {"OrderedDict", made(global("collections", "OrderedDict"), {}) + "K\1Ns",
       made(global("collections", "OrderedDict"), {}) + "Na"},
      {"defaultdict", made(global("collections", "defaultdict"), {builtin("list")}) + "K\1Ns",
       made(global("collections", "defaultdict"), {global("numpy", "ndarray")})},
      {"deque", made(global("collections", "deque"), {")", "K\3"}) + "Na",
       made(global("collections", "deque"), {kList, "K\3"})},
      {"Counter", made(global("collections", "Counter"), {"}K\1K\2s"}),
       made(global("collections", "Counter"), {kList})},
      {"SimpleNamespace", made(global("types", "SimpleNamespace"), {}) + dict({{"a", "N"}}) + "b",
       made(global("types", "SimpleNamespace"), {}) + "}K\1Nsb"},
      {"BytesIO", object(global("_io", "BytesIO"), tuple({bytes("a"), "K\0"s, "N"})),
       object(global("_io", "BytesIO"), tuple({bytes("a"), "K\0"s, dict({{"a", "N"}})}))},
      {"dtype", kDType,
       made(global("numpy", "dtype"), {text("O8"), "\x89", "\x88"}) +
           tuple({"K\3", text("|"), "N", "N", "N", "K\1", "K\1", "K\1"}) + "b"},
      {"array",
       made(global("numpy._core.multiarray", "_reconstruct"),
            {global("numpy", "ndarray"), tuple({"K\0"s}), bytes("b")}) +
           tuple({"K\1", tuple({"K\1"}), kDType, "\x89", bytes("a")}) + "b",
       made(global("numpy._core.multiarray", "_reconstruct"),
            {global("numpy", "ndarray"), tuple({"K\0"s}), bytes("b")}) +
           tuple({"K\1", tuple({"K\1"}), kDType, "\x89", kList}) + "b"},
      {"scalar of numpy 1", made(global("numpy.core.multiarray", "scalar"), {kDType, bytes("a")}),
       made(global("numpy.core.multiarray", "scalar"), {kDType, kList})},
      {"array of protocol 5", made(global("numpy.core.numeric", "_frombuffer"), {bytes("a"), kDType, ")", text("C")}),
       made(global("numpy.core.numeric", "_frombuffer"), {text("a"), kDType, ")", text("C")})},
      {"torch.Size", made(global("torch", "Size"), {tuple({"K\1"})}), made(global("torch", "Size"), {tuple({"N"})})},
      {"torch.device", made(global("torch", "device"), {text("cuda"), "K\1"}),
       made(global("torch", "device"), {"K\1"})},
      {"torch.dtype", global("torch", "float32"), global("torch", "load")},
      {"a class", kDType, builtin("int")},
  };
  for (const Case& one : cases) {
    CHECK_MESSAGE(lets_in(one.good), one.what);
    CHECK_MESSAGE(lets_in(tuple({one.good, list({one.good})})), one.what);
    EXPECT_CODE(kUnsupported, checked(whole(one.bad)));
  }
}

TEST_CASE("standard_pickle: a state or items where a type has none, calls where instances are wanted") {
  const std::string set = made(builtin("set"), {kList});
  CHECK_FALSE(lets_in(set + "}b"));
  CHECK_FALSE(lets_in(set + "Na"));
  CHECK_FALSE(lets_in(made(global("uuid", "UUID"), {}) + "}" + text("int") + "K\1sb"));
  CHECK_FALSE(lets_in(builtin("set") + tuple({kList}) + "\x81"));
  CHECK_FALSE(lets_in(object(global("uuid", "UUID"), "}")));
  CHECK_FALSE(lets_in(global("os", "system")));
  EXPECT_CODE(kCorrupt, checked(whole(made(global("collections", "deque"), {}) + "NaNNs")));
}

TEST_CASE("standard_pickle: opcodes of later protocols") {
  CHECK(lets_in("\x8F(K\1\x85K\2\x90"));
  CHECK(lets_in("(K\1\x91"));
  CHECK(lets_in("\x96\1\0\0\0\0\0\0\0a"s));
  CHECK(lets_in("\x8A\x0A"s + std::string(10, '\x7F')));
  EXPECT_CODE(kCorrupt, checked(whole("](K\1\x90")));
  EXPECT_CODE(kCorrupt, checked(whole("\x8FNa")));
  // They are refused where only builtin values are allowed.
  const PickleRules builtin_rules{find_standard_global, false};
  for (const std::string& value : {"\x8F"s, "(\x91"s, "\x8A\x0A"s + std::string(10, '\x7F')}) {
    EXPECT_CODE(kUnsupported, read_pickle(whole(value), builtin_rules));
  }
}

TEST_CASE("standard_pickle: references and cycles are let in, arguments that others have are not") {
  CHECK(lets_in("]" + put(0) + get(0) + "a"));
  CHECK(lets_in(tuple({kList + put(0), get(0)})));
  CHECK_FALSE(lets_in(tuple({kList + put(0), made(builtin("set"), {get(0)})})));
  CHECK_FALSE(lets_in(tuple({made(builtin("set"), {kList + put(0)}), get(0)})));
}

TEST_CASE("standard_pickle: depth, and the steps of hashing, are bounded") {
  CHECK(lets_in(repeated("]", 101) + repeated("a", 100)));
  CHECK_FALSE(lets_in(repeated("]", 102) + repeated("a", 101)));
  // A tuple doubled sixty times: it takes a few bytes, but its hash would never end.
  std::string key = "K\1\x85";
  for (uint32_t i = 0; i < 60; ++i) key += put(i) + get(i) + "\x86";
  CHECK(lets_in(list({key})));
  CHECK_FALSE(lets_in("}" + key + "Ns"));
  CHECK_FALSE(lets_in("\x8F(" + key + "\x90"));
  CHECK_FALSE(lets_in(made(builtin("set"), {list({key})})));
  // The same holds for a long number in many places.
  const std::string number = made(global("decimal", "Decimal"), {text(std::string(10000, '1'))}) + put(0);
  CHECK(lets_in("}" + number + "Ns"));
  CHECK_FALSE(lets_in("}(" + number + "N" + repeated(get(0) + "N", 1000) + "u"));
}

/// The pickle that torch.save writes for a uint8 tensor over a storage of 8 bytes.
std::string tensor_of(const std::string& sizes, const std::string& strides,
                      const std::string& storage = "ByteStorage") {
  const std::string id = tuple({text("storage"), global("torch", storage), text("0"), text("cpu"), "K\x08"});
  return made(global("torch._utils", "_rebuild_tensor_v2"),
              {id + "Q", "K\1", sizes, strides, "\x89", made(global("collections", "OrderedDict"), {})});
}

TEST_CASE("standard_pickle: plain tensors beside standard types") {
  const auto holds = [](const std::string& value) {
    const std::string bytes = whole(value);
    const auto pickle = read_pickle(bytes, standard_rules());
    std::unordered_map<uint32_t, PickledTensor> tensors;
    return pickle.is_ok() && check_standard(pickle.value(), &tensors).is_ok() ? tensors.size() : 0;
  };
  const std::string tensor = tensor_of(tuple({"K\4"}), tuple({"K\1"})), set = made(builtin("set"), {kList});
  const std::string hooks = made(global("collections", "OrderedDict"), {});
  CHECK(holds(tuple({set, tensor, tensor})) == 2);
  CHECK(holds(tuple({set, tensor + put(7), get(7)})) == 1);
  CHECK(holds(tuple({set, made(global("torch._utils", "_rebuild_parameter"), {tensor, "\x88", hooks})})) == 1);
  // Torch's own rules accept a tensor without standard types. Without a map to put tensors into, tensors are refused.
  CHECK(holds(list({tensor})) == 0);
  CHECK_FALSE(lets_in(tuple({set, tensor})));
  // Hooks, a storage alone, a storage of another kind, a tensor with a state.
  CHECK(holds(tuple({set, made(global("torch._utils", "_rebuild_parameter"), {tensor, "\x88", hooks + "K\1Ns"})})) ==
        0);
  CHECK(holds(tuple({set, tensor, text("storage") + "Q"})) == 0);
  CHECK(holds(tuple({set, tensor, global("torch", "ByteStorage")})) == 0);
  CHECK(holds(tuple({set, tensor_of("K\4", "K\1")})) == 0);
  CHECK(holds(tuple({set, tensor_of(tuple({"K\4"}), tuple({"K\1"}), "QInt8Storage")})) == 0);
  CHECK(holds(tuple({set, tensor + "}b"})) == 0);
  // Arguments that are used in many places take only a few bytes for each tensor.
  const std::string rebuild = global("torch._utils", "_rebuild_tensor_v2");
  const std::string args = tensor.substr(rebuild.size(), tensor.size() - rebuild.size() - 1);
  const std::string many = "](" + set + rebuild + put(1) + args + put(2) + "R";
  CHECK(holds(many + get(1) + get(2) + "Re") == 2);
  CHECK(holds(many + repeated(get(1) + get(2) + "R", 100) + "e") == 0);
}

TEST_CASE("standard_pickle: tensors lie in their storages, which are as they were written") {
  const std::string set = made(builtin("set"), {kList});
  const auto archive_of = [&](const std::string& size, const std::string& storage) {
    const std::string tensor = tensor_of(tuple({size}), tuple({"K\2"}));
    return test::zip_of(
        {{"archive/data.pkl", whole(tuple({set, tensor}))}, {"archive/data/0", storage}, {"archive/version", "3\n"}});
  };
  const std::string archive = archive_of("K\4", "01234567");  // must outlive the result, which refers to it
  const auto found = test::value_of(read_standard_archive(archive));
  REQUIRE(found.has_value());
  REQUIRE(found->tensors.size() == 1);
  CHECK(found->tensors.begin()->second.pickled.location == "cpu");
  CHECK(found->tensors.begin()->second.archived.storage_bytes == 8);
  EXPECT_CODE(kCorrupt, read_standard_archive(archive_of("K\5", "01234567")).status());
  EXPECT_CODE(kCorrupt, read_standard_archive(archive_of("K\4", "0123456")).status());
}

TEST_CASE("standard_pickle: archives") {
  const auto archive_of = [](const std::string& value) {
    return test::zip_of({{"archive/data.pkl", whole(value)}, {"archive/version", "3\n"}});
  };
  const auto in = [&](const std::string& archive) {
    return test::value_of(read_standard_archive(archive)).has_value();
  };
  CHECK(in(archive_of("\x8F")));
  CHECK(in(archive_of(text(std::string(2 << 20, 'x')))));
  CHECK_FALSE(in(archive_of(global("m", "C"))));
  CHECK_FALSE(in(""));
  CHECK_FALSE(in(whole("\x8F")));
  CHECK_FALSE(in(test::zip_of({{"archive/data.pkl", whole("\x8F")}, {"archive/constants.pkl", "x"}})));
}

}  // namespace
}  // namespace bytecheckpoint::format
