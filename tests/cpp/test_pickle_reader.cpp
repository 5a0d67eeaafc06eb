// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle/pickle_reader.h"

#include <cmath>
#include <limits>
#include <string>

#include "csrc/base/utf8.h"
#include "csrc/format/pickle/pickle_tree.h"
#include "csrc/format/pickle/pickle_writer.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/make_tree.h"
#include "tests/cpp/mutate.h"
#include "tests/cpp/pickle_parts.h"
#include "tests/cpp/pickle_rules.h"
#include "tests/cpp/rounds.h"
#include "tests/cpp/sample_file.h"

namespace bytecheckpoint::format {
namespace {

using namespace std::string_literals;  // NOLINT: many parts hold zeros
using namespace test::pickled;         // NOLINT
using test::kRules;
using test::read;
using test::tree_of;
using Kind = PickleValue::Kind;

TEST_CASE("pickle_reader: whatever our writer makes of a tree comes back") {
  std::vector<Tree> ints, values;
  for (int64_t value : {int64_t{0}, int64_t{255}, int64_t{65535}, int64_t{65536}, int64_t{-1}, int64_t{-129},
                        int64_t{1} << 31, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()}) {
    ints.push_back(test::integer(value));
  }
  for (double value : {0.0, -0.0, 1.5, std::numeric_limits<double>::infinity(), std::nan("")}) {
    values.push_back(test::real(value));
  }
  values.push_back(test::leaf(Tree::Kind::kNone));
  values.push_back(test::leaf(Tree::Kind::kTrue));
  values.push_back(test::leaf(Tree::Kind::kFalse));
  values.push_back(test::string("\0\xFF"s, Tree::Kind::kBytes));
  values.push_back(test::string(std::string(300, 'x')));
  values.push_back(test::holding(Tree::Kind::kTuple, ints));
  const Tree tree =
      test::holding(Tree::Kind::kDict, {test::string("key \xC3\xA9"), test::holding(Tree::Kind::kList, values)});
  PickleWriter writer(4);
  writer.tree(tree);
  CHECK(test::value_of(tree_of(writer.finish())) == tree);
}

TEST_CASE("pickle_reader: tells where STOP was, and leaves what follows alone") {
  const std::string bytes = "\x80\x04K\7." + std::string("BCPMANI");
  const Pickle pickle = test::value_of(read(bytes));
  CHECK(pickle.end() == 5);
  CHECK(pickle.root().is(Kind::kInt));
  CHECK(pickle.integer(pickle.root()) == 7);
}

TEST_CASE("pickle_reader: an object is its class, arguments and state; a call its function and arguments") {
  const std::string bytes =
      whole(tuple({object(global("m", "C"), dict({{"a", "K\1"}})), call(global("m", "f"), tuple({"K\2"})), "N"}));
  const Pickle pickle = test::value_of(read(bytes));
  const PickleSpan parts = pickle.children(pickle.root());
  REQUIRE(parts.size() == 3);
  const auto instance = pickle.object(parts[0], Kind::kObject, 1);
  REQUIRE(instance.has_value());
  CHECK(pickle.children(instance->args).size() == 0);
  CHECK(pickle.text(pickle.children(instance->state)[0]) == "a");
  CHECK_FALSE(pickle.object(parts[0], Kind::kObject, 2).has_value());
  CHECK_FALSE(pickle.object(parts[0], Kind::kCall, 1).has_value());
  const auto result = pickle.object(parts[1], Kind::kCall, 2);
  REQUIRE(result.has_value());
  CHECK(pickle.integer(pickle.children(result->args)[0]) == 2);
  CHECK(result->state.is(Kind::kHole));
  CHECK_FALSE(pickle.object(parts[2]).has_value());
  CHECK(pickle.children(parts[2]).size() == 0);
}

TEST_CASE("pickle_reader: memo by number, by count, overwritten; lists seen from two places are one") {
  const Tree one = test::holding(Tree::Kind::kList, {test::integer(1)});
  CHECK(test::value_of(tree_of(whole("(]q\5h\5K\1aj\5\0\0\0t"s))) ==
        test::holding(Tree::Kind::kTuple, {one, one, one}));
  // MEMOIZE gives each entry the current number of entries as its number.
  const Tree seven = test::integer(7), eight = test::integer(8);
  CHECK(test::value_of(tree_of("\x80\x04(K\7\x94K\x08\x94h\1h\0t."s)) ==
        test::holding(Tree::Kind::kTuple, {seven, eight, eight, seven}));
}

TEST_CASE("pickle_reader: lists and dicts that are filled in turn, in many steps") {
  // Two lists and a dict each get one or two elements, a thousand times.
  std::string program = "(]\x94]\x94}\x94";
  std::vector<Tree> first, second, third;
  for (int i = 0; i < 1000; ++i) {
    const std::string number = "M" + little(static_cast<uint16_t>(i));
    program += "h" + "\0"s + number + "ah\1(" + number + "NeN\x85h\2" + number + "Ns";
    first.push_back(test::integer(i));
    second.insert(second.end(), {test::integer(i), test::leaf(Tree::Kind::kNone)});
    third.insert(third.end(), {test::integer(i), test::leaf(Tree::Kind::kNone)});
  }
  const std::string bytes = whole(program + "t");
  const Pickle pickle = test::value_of(read(bytes));
  const PickleSpan all = pickle.children(pickle.root());
  CHECK(pickle.children(all[1])[1998].is(Kind::kInt));
  UnfoldBudget budget(pickle);
  CHECK(test::value_of(unfold_tree(pickle, all[0], &budget)) == test::holding(Tree::Kind::kList, first));
  CHECK(test::value_of(unfold_tree(pickle, all[1], &budget)) == test::holding(Tree::Kind::kList, second));
  CHECK(test::value_of(unfold_tree(pickle, all[2], &budget)) == test::holding(Tree::Kind::kDict, third));
}

TEST_CASE("pickle_reader: a tuple has as many elements as it likes") {
  for (const size_t count : {(size_t{1} << 24) - 2, (size_t{1} << 24) - 1, (size_t{1} << 24) + 1}) {
    const std::string bytes = whole("(" + std::string(count, 'N') + "K\7t");
    const Pickle pickle = test::value_of(read(bytes));
    const PickleSpan children = pickle.children(pickle.root());
    REQUIRE(children.size() == count + 1);
    CHECK(children[0].is(Kind::kNone));
    CHECK(pickle.integer(children[count]) == 7);
  }
}

TEST_CASE("pickle_reader: memo entries are numbered one after the other, but for the first few") {
  EXPECT_OK(read(whole("Nq\xFF")));
  EXPECT_OK(read(whole("N" + put(255))));
  EXPECT_FAILURE(kCorrupt, "memo entry 256 is too high after 0 entries",
                 read(whole(text(std::string(300, 'x')) + put(256))));
  std::string counted = "N";
  for (uint32_t i = 1; i <= 1000; ++i) counted += put(i);  // as Python 2 did
  EXPECT_OK(read(whole(counted)));
  EXPECT_OK(read(whole(counted + put(1001))));
  EXPECT_FAILURE(kCorrupt, "memo entry 1002 is too high after 1000 entries", read(whole(counted + put(1002))));
}

TEST_CASE("pickle_reader: persistent ids where they are allowed") {
  const std::string bytes = whole(tuple({text("storage"), text("0")}) + "Q");
  EXPECT_FAILURE(kUnsupported, "BINPERSID (0x51)", read(bytes));
  const Pickle pickle = test::value_of(read_pickle(bytes, {kRules.global, true}));
  REQUIRE(pickle.root().is(Kind::kPersistent));
  CHECK(pickle.text(pickle.children(pickle.object(pickle.root())->args)[1]) == "0");
}

TEST_CASE("pickle_reader: globals outside the list are refused by name and byte, however they are reached") {
  const std::string system = global("posix", "system"), command = tuple({text("true")});
  EXPECT_FAILURE(kUnsupported, "GLOBAL (0x63) at byte 2: global 'posix.system' is not allowed", read(whole(system)));
  EXPECT_CODE(kUnsupported, read(whole(call(system, command))));
  EXPECT_CODE(kUnsupported, read(whole(object(global("builtins", "eval"), dict({})))));
  EXPECT_FAILURE(kUnsupported, "global 'builtins.eval'", read(whole(text("builtins") + text("eval") + "\x93")));
  EXPECT_FAILURE(kUnsupported, "global 'm.C.__init__'", read(whole(text("m") + text("C.__init__") + "\x93")));
  EXPECT_FAILURE(kUnsupported, "at byte 2", read(whole(system)));
  EXPECT_FAILURE(kUnsupported, "nothing of the pickle was run", read(whole(system)));
  // The reader does not know the opcodes that find globals in other ways.
  EXPECT_FAILURE(kUnsupported, "INST (0x69) at byte 3", read(whole("(iposix\nsystem\n")));
  EXPECT_FAILURE(kUnsupported, "OBJ (0x6f)", read(whole("(" + global("m", "C") + text("true") + "o")));
  EXPECT_FAILURE(kUnsupported, "NEWOBJ_EX (0x92)", read(whole(global("m", "C") + ")}\x92")));
  EXPECT_FAILURE(kUnsupported, "EXT1 (0x82) at byte 2", read(whole("\x82\x01")));
  EXPECT_FAILURE(kUnsupported, "EXT2 (0x83)", read(whole("\x83\1\0"s)));
  EXPECT_FAILURE(kUnsupported, "EXT4 (0x84)", read(whole("\x84\1\0\0\0"s)));
  EXPECT_FAILURE(kUnsupported, "PERSID (0x50)", read(whole("Pid\n")));
}

TEST_CASE("pickle_reader: classes and functions are no targets, and no objects") {
  EXPECT_FAILURE(kCorrupt, "BUILD (0x62)", read(whole(global("m", "C") + dict({{"__reduce__", "K\1"}}) + "b")));
  EXPECT_FAILURE(kCorrupt, "sets items of something that is not a dict", read(whole(global("m", "C") + "K\1K\1s")));
  EXPECT_FAILURE(kCorrupt, "not a tuple", read(whole(global("m", "f") + "]R")));
  EXPECT_FAILURE(kCorrupt, "not a tuple", read(whole(global("m", "C") + "}\x81")));
  EXPECT_FAILURE(kUnsupported, "not a global", read(whole(call(call(global("m", "f"), ")"), ")"))));
  EXPECT_FAILURE(kUnsupported, "not a global", read(whole(text("eval") + ")R")));
  EXPECT_FAILURE(kUnsupported, "neither a list nor a dict", read(whole(call(global("m", "f"), ")") + "K\1a")));
  EXPECT_FAILURE(kCorrupt, "already has one", read(whole(object(global("m", "C"), "}") + "}b")));
  EXPECT_FAILURE(kCorrupt, "not a string", read(whole("K\1K\1\x93")));
}

TEST_CASE("pickle_reader: what is cut anywhere is corrupt") {
  for (const char* name : {"stock.metadata", "protocol2.metadata"}) {
    const std::string bytes = test::sample_file(name);
    const PickleRules any{[](std::string_view, std::string_view) { return std::optional<uint32_t>(0); }, true};
    EXPECT_OK(read_pickle(bytes, any));
    for (size_t size = 0; size < bytes.size(); ++size) {
      const std::string cut = bytes.substr(0, size);  // on the heap, so the sanitizer notices a read past its end
      EXPECT_CODE(kCorrupt, read_pickle(cut, any));
    }
  }
}

TEST_CASE("pickle_reader: what no pickler writes is corrupt, and the message says which opcode where") {
  EXPECT_FAILURE(kCorrupt, "byte 0xff at byte 2: not an opcode", read("\x80\x04\xff."));
  EXPECT_FAILURE(kCorrupt, "TUPLE2 (0x86) at byte 4", read("\x80\x04K\1\x86."));
  EXPECT_FAILURE(kCorrupt, "without STOP", read(""));
  EXPECT_FAILURE(kCorrupt, "must hold 1 value at the end, but holds 0", read("\x80\x04."));
  EXPECT_FAILURE(kCorrupt, "must hold 1 value at the end, but holds 2", read("\x80\x04NN."));
  EXPECT_FAILURE(kCorrupt, "STOP", read("\x80\x04N(."));
  EXPECT_FAILURE(kCorrupt, "no mark", read("\x80\x04Nt."));
  EXPECT_FAILURE(kCorrupt, "above its mark", read("\x80\x04N(R."));
  EXPECT_FAILURE(kCorrupt, "above its mark", read("\x80\x04N(q\1."));
  EXPECT_FAILURE(kCorrupt, "above its mark", read("\x80\x04(NNe."));
  EXPECT_FAILURE(kCorrupt, "no memo entry 3", read("\x80\x04h\3."));
  EXPECT_FAILURE(kCorrupt, "no memo entry 1", read("\x80\x04Nq\2h\1."));
  EXPECT_FAILURE(kCorrupt, "memo entry 4294967295", read(whole("N" + put(0xFFFFFFFF))));
  EXPECT_FAILURE(kCorrupt, "without a value", read("\x80\x04}(Nu."));
  EXPECT_FAILURE(kCorrupt, "as a key", read("\x80\x04}]Ns."));
  EXPECT_FAILURE(kCorrupt, "as a key", read("\x80\x04}(NN}Nu."));
  EXPECT_FAILURE(kCorrupt, "appends to something that is not a list", read("\x80\x04}Na."));
  EXPECT_FAILURE(kCorrupt, "not UTF-8", read("\x80\x04\x8c\1\x80."));
  EXPECT_FAILURE(kCorrupt, "not UTF-8", read("\x80\x04\x8c\3\xED\xA0\x80."));
  EXPECT_FAILURE(kCorrupt, "not UTF-8", read("\x80\2c\xff\nx\n."));
  EXPECT_FAILURE(kCorrupt, "without an end", read("\x80\2cmodule."));
  EXPECT_FAILURE(kCorrupt, "cut off at byte 5", read("\x80\x04\x8c\5x"));
  EXPECT_FAILURE(kCorrupt, "cut off", read("\x80\x04X\xff\xff\xff\xff."));
  EXPECT_FAILURE(kCorrupt, "cut off", read("\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xff."));
  EXPECT_FAILURE(kCorrupt, "longer than the bytes left", read("\x80\x04\x95\2\0\0\0\0\0\0\0."s));
  EXPECT_FAILURE(kCorrupt, "beyond its frame", read("\x80\x04\x95\1\0\0\0\0\0\0\0K\1."s));
  EXPECT_FAILURE(kCorrupt, "within a frame", read("\x80\x04\x95\x0b\0\0\0\0\0\0\0\x95\2\0\0\0\0\0\0\0N."s));
  EXPECT_OK(read("\x80\x04\x95\2\0\0\0\0\0\0\0K\1."s));
  EXPECT_OK(read("\x80\x04\x95\1\0\0\0\0\0\0\0N\x95\1\0\0\0\0\0\0\0."s));
  EXPECT_FAILURE(kUnsupported, "protocol 6", read("\x80\x06N."));
}

TEST_CASE("pickle_reader: an int is any that fits into 64 bits, in as many bytes as it likes") {
  const auto long1 = [](std::string bytes) {
    return tree_of("\x80\x04\x8A" + std::string(1, static_cast<char>(bytes.size())) + bytes + ".");
  };
  CHECK(test::value_of(long1("")) == test::integer(0));
  CHECK(test::value_of(long1("\xFF")) == test::integer(-1));
  CHECK(test::value_of(long1("\xFF\0"s)) == test::integer(255));
  CHECK(test::value_of(long1("\0\x80"s)) == test::integer(-32768));
  CHECK(test::value_of(long1(std::string(8, '\xFF') + std::string(2, '\xFF'))) == test::integer(-1));
  CHECK(test::value_of(long1(std::string(7, '\xFF') + "\x7F" + std::string(3, '\0'))) ==
        test::integer(std::numeric_limits<int64_t>::max()));
  EXPECT_FAILURE(kUnsupported, "beyond 64 bits", long1(std::string(8, '\xFF') + std::string(1, '\0')));
  EXPECT_CODE(kUnsupported, long1(std::string(7, '\0') + "\x80" + std::string(1, '\0')));
  EXPECT_CODE(kUnsupported, long1(std::string(8, '\0') + "\x01"));
  EXPECT_CODE(kUnsupported, long1(std::string(255, '\x01')));
}

TEST_CASE("pickle_reader: mutated pickles never crash, and say what is wrong in UTF-8") {
  std::vector<std::string> samples;
  for (const char* name : {"stock.metadata", "protocol2.metadata", "dtypes.metadata"}) {
    samples.push_back(test::sample_file(name));
  }
  const PickleRules any{[](std::string_view, std::string_view) { return std::optional<uint32_t>(0); }, true};
  test::Mutator mutate(17, samples, std::string(kOpcodes));
  int accepted = 0;
  for (int round = 0; round < test::rounds(40000); ++round) {
    const std::string bytes = mutate(samples[mutate.below(samples.size())]);
    const auto pickle = read_pickle(bytes, round % 2 == 0 ? any : kRules);
    if (!pickle.is_ok()) {
      const base::Code code = pickle.status().code();
      REQUIRE((code == base::Code::kCorrupt || code == base::Code::kUnsupported));
      REQUIRE(base::is_utf8(pickle.status().message()));
      continue;
    }
    ++accepted;
    UnfoldBudget budget(pickle.value());
    (void)unfold_tree(pickle.value(), pickle.value().root(), &budget).is_ok();
  }
  CHECK(accepted > test::rounds(100));
}

/// A random program of the stack machine: opcodes with fitting operands, names that are allowed, memo entries that may
/// exist.
std::string random_program(test::Mutator* random) {
  const std::string parts[] = {"(",       ")",       "N",       "\x88",    "K\1",        "]",         "}",
                               "a",       "e",       "s",       "u",       "t",          "\x85",      "\x86",
                               "\x87",    "\x94",    "q\0"s,    "q\1",     "h\0"s,       "h\1",       "h\2",
                               "R",       "\x81",    "b",       "Q",       "\x93",       "J\1\2\3\4", "G12345678",
                               "\x8c\1m", "\x8c\1C", "cm\nC\n", "cm\nf\n", "C\2\xff\xff"};
  std::string program = "\x80\x04";
  for (size_t steps = 1 + random->below(40); steps != 0; --steps) program += parts[random->below(std::size(parts))];
  // Half of the programs end by putting everything into one tuple, so that one value is left.
  return random->below(2) == 0 ? program + "." : program.insert(2, "(") + "t.";
}

TEST_CASE("pickle_reader: random programs never crash, and what they build can be walked") {
  test::Mutator random(18, {"x"}, "x");
  int accepted = 0;
  for (int round = 0; round < test::rounds(150000); ++round) {
    const std::string bytes = random_program(&random);
    const auto pickle = read_pickle(bytes, {kRules.global, true});
    if (!pickle.is_ok()) continue;
    ++accepted;
    UnfoldBudget budget(pickle.value());
    (void)unfold_tree(pickle.value(), pickle.value().root(), &budget).is_ok();
  }
  CHECK(accepted > test::rounds(1000));
}

}  // namespace
}  // namespace bytecheckpoint::format
