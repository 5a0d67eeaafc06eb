// SPDX-License-Identifier: Apache-2.0
// Inputs that take the most memory for their bytes, written by hand. Under AddressSanitizer the properties of
// tests/fuzz measure the memory.
#include "tests/fuzz/peak_memory.h"

#include <string>
#include <utility>
#include <vector>

#include "csrc/format/dcp/foreign_metadata.h"
#include "csrc/format/pickle/pickle_tree.h"
#include "csrc/format/torch/builtin_archive.h"
#include "csrc/format/torch/torch_archive.h"
#include "tests/cpp/expect.h"
#include "tests/cpp/make_tree.h"
#include "tests/cpp/pickle_parts.h"
#include "tests/cpp/zip_of.h"
#include "tests/fuzz/in_memory.h"

namespace bytecheckpoint::format {
namespace {

using namespace std::string_literals;  // NOLINT: many parts hold zeros
using namespace test::pickled;         // NOLINT

// Builds that measure nothing use small inputs.
#ifdef __SANITIZE_ADDRESS__  // gcc's macro
constexpr size_t kCounts[] = {1, 10, 1000, 5000, 300000};
#else
constexpr size_t kCounts[] = {1, 1000};
#endif

/// Programs of about `count` steps, most of one byte. Some do not reach their end, but their memory counts all the
/// same.
std::vector<std::pair<const char*, std::string>> worst_pickles(size_t count) {
  const auto times = [&](const std::string& step) { return repeated(step, count / step.size() + 1); };
  const size_t half = count / 2 + 1;
  return {
      {"values on the stack", times("N")},
      {"values in a tuple", "(" + times("N") + "t"},
      {"values in a list", "](" + times("N") + "e"},
      {"values in a list, one by one", "]" + times("Na")},
      {"values in a dict", "}(" + times("NN") + "u"},
      {"values in a dict, one by one", "}" + times("NNs")},
      {"empty lists", "(" + times("]") + "t"},
      {"empty dicts", "(" + times("}") + "t"},
      {"empty tuples", "(" + times(")") + "t"},
      {"marks", times("(")},
      {"marks and values", times("(N")},
      {"tuples within tuples", "N" + times("\x85")},
      {"tuples within tuples, not too deep", "(" + times("N" + repeated("\x85", 90)) + "t"},
      {"tuples of one", "(" + times("N\x85") + "t"},
      {"lists within lists", repeated("]", half) + repeated("a", half - 1)},
      {"lists within lists, not too deep", "(" + times(repeated("]", 90) + repeated("a", 89)) + "t"},
      {"lists of one", "(" + times("]Na") + "t"},
      {"lists of one, kept", "(" + times("]\x94Na") + "t"},
      {"empty lists, kept", "(" + times("]\x94") + "t"},
      {"empty lists, kept and filled", "(" + times("]\x94") + repeated("a", count / 2)},
      {"memo entries of one value", "N" + times("\x94")},
      {"memo entries", "(" + times("N\x94") + "t"},
      {"a memo entry far away", "N" + times("]") + put(static_cast<uint32_t>(count))},
      {"memo references", "(N\x94" + times("h\0"s) + "t"},
      {"persistent ids", "N" + times("Q")},
      {"globals", "(" + times("c\n\n") + "t"},
      {"calls", "(" + global("_codecs", "encode") + "\x94" + times("h\0)R"s) + "t"},
      {"objects with a state", "(" + global("_codecs", "encode") + "\x94" + times("h\0)\x81Nb"s) + "t"},
      {"ints", "(" + times("K\1") + "t"},
      {"an int, shared", "(K\1\x94" + times("h\0"s) + "t"},
      {"two lists, filled in turn", "(]\x94]\x94" + times("h\0Nah\1Na"s) + "t"},
      {"a text, shared", "(" + text(std::string(count, 'x')) + "\x94" + times("h\0"s) + "t"},
      {"bytes of protocol 2, shared",
       "(" + call(global("_codecs", "encode"), tuple({text(std::string(count, 'x')), text("latin1")})) + "\x94" +
           repeated("h\0"s, 14) + "t"},
      {"a tuple, shared", "(" + tuple({repeated("N", half)}) + "\x94" + repeated("h\0"s, 20) + "t"},
  };
}

/// Checks that the memory that `parse` takes for the bytes is within the bound.
template <class Parse>
void check(const std::string& parser, const std::string& what, const std::string& bytes, Parse&& parse) {
  fuzz::PeakMemory memory(bytes.size());
  (void)parse(bytes).is_ok();
  const std::string fault = memory.stop();
  CHECK_MESSAGE(fault.empty(), parser, ", ", what, ", ", bytes.size(), " bytes: ", fault);
}

base::Result<Tree> tree_of(const std::string& bytes) {
  const auto find = [](std::string_view, std::string_view name) {
    return std::make_optional(name == "encode" ? 1u : 0u);
  };
  BCP_ASSIGN_OR_RETURN(const Pickle pickle, read_pickle(bytes, {find, true}));
  UnfoldBudget budget(pickle);
  return unfold_tree(pickle, pickle.root(), &budget, {false, 1u});
}

base::Result<std::optional<ArchivedTensor>> tensor_of(const std::string& archive) {
  return read_tensor_archive(static_cast<int64_t>(archive.size()), fuzz::in_memory(archive));
}

TEST_CASE("peak_memory: pickles, what is in them, and archives of them") {
  for (const size_t count : kCounts) {
    for (const auto& [what, program] : worst_pickles(count)) {
      const std::string bytes = whole(program);
      const std::string archive = test::zip_of({{"archive/data.pkl", bytes}, {"archive/version", "3\n"}});
      check("unfold_tree", what, bytes, tree_of);
      check("read_foreign_metadata", what,
            whole(object(global("torch.distributed.checkpoint.metadata", "Metadata"),
                         "}(" + text("state_dict_metadata") + "}" + text("planner_data") + program + "u")),
            read_foreign_metadata);
      check("decode_builtin_archive", what, archive, decode_builtin_archive);
      check("read_tensor_archive", what, archive, tensor_of);
    }
  }
}

TEST_CASE("peak_memory: trees") {
  using Kind = Tree::Kind;
  for (const size_t count : kCounts) {
    check("decode_tree", "Nones", test::holding(Kind::kList, std::vector<Tree>(count)).bytes(), decode_tree);
    const std::vector<Tree> empty(count, test::holding(Kind::kTuple, {}));
    check("decode_tree", "empty tuples", test::holding(Kind::kList, empty).bytes(), decode_tree);
    base::ByteWriter claims;
    for (size_t i = 0; i < count; ++i) encode_container(Kind::kList, 0xFFFFFFFF, &claims);
    check("decode_tree", "lists that claim", claims.bytes(), decode_tree);
  }
}

TEST_CASE("peak_memory: honest values of a byte each are read, a million of them") {
  for (const char* value : {"N", "\x88", ")", "]", "}"}) {
    for (const std::string& bytes :
         {whole("](" + repeated(value, 1 << 20) + "e"), whole("(" + repeated(value, 1 << 20) + "t")}) {
      const PickleRules none{[](std::string_view, std::string_view) { return std::optional<uint32_t>(); }, false};
      const Pickle pickle = test::value_of(read_pickle(bytes, none));
      UnfoldBudget budget(pickle);
      CHECK(test::root_of(test::value_of(unfold_tree(pickle, pickle.root(), &budget))).num_children == 1 << 20);
      CHECK(pickle.children(pickle.root()).size() == 1 << 20);
    }
  }
}

/// Many keys, chunks and storage entries that share all they can, or hold as little as possible.
TEST_CASE("peak_memory: metadata") {
  const std::string module = "torch.distributed.checkpoint.metadata";
  for (const size_t count : {10, 1000, 60000}) {
    const auto metadata = [&](const std::string& items, const std::string& places) {
      return whole(object(global(module, "Metadata"),
                          "}(" + text("state_dict_metadata") + items + text("storage_data") + places + "u"));
    };
    std::string keys = "}(", last = global(module, "BytesStorageMetadata") + ")\x81\x94";
    for (size_t i = 0; i < count; ++i) {
      keys += "\x8C\4" +
              little(static_cast<uint32_t>(i & 0x7F) | (i >> 7 & 0x7F) << 8 | (i >> 14 & 0x7F) << 16 | 'x' << 24);
      keys += i == 0 ? last : "h\0"s;
    }
    check("read_foreign_metadata", "keys", metadata(keys + "u", "N"), read_foreign_metadata);
    std::string chunk =
        object(global(module, "ChunkStorageMetadata"), dict({{"offsets", ")"}, {"sizes", ")"}})) + "\x94";
    const std::string properties =
        global(module, "TensorProperties") + ")\x81" +
        tuple({global("torch", "float32"),
               call(global("torch.serialization", "_get_layout"), text("torch.strided") + "\x85"), "\x89",
               call(global(module, "_MEM_FORMAT_ENCODING"), "K\1\x85"), "\x89"}) +
        "b";
    check("read_foreign_metadata", "chunks",
          metadata("}(" + text("w") +
                       object(global(module, "TensorStorageMetadata"),
                              dict({{"properties", properties},
                                    {"size", ")"},
                                    {"chunks", "](" + chunk + repeated("h\0"s, count) + "e"}})) +
                       "u",
                   "N"),
          read_foreign_metadata);
    const std::string index = object(global(module, "MetadataIndex"), dict({{"fqn", text("xxxx")}})) + "\x94";
    check("read_foreign_metadata", "places",
          metadata("}" + text("xxxx") + global(module, "BytesStorageMetadata") + ")\x81s",
                   "}(" + index + "N" + repeated("h\0N"s, count) + "u"),
          read_foreign_metadata);
  }
}

}  // namespace
}  // namespace bytecheckpoint::format
