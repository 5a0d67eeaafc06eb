// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"

namespace bytecheckpoint::format {

/// One value that a pickle builds: a scalar, or a reference into its Pickle. Texts point into the bytes that were read,
/// so a value lives as long as both.
struct PickleValue {
  enum class Kind : uint8_t {
    kHole,  // no value: an attribute that is not there
    kNone,
    kBool,
    kInt,
    kFloat,
    kString,  // UTF-8
    kBytes,
    kTuple,
    kList,
    kDict,
    kGlobal,      // a name; what it names was never looked for
    kObject,      // what NEWOBJ would have made of a class
    kCall,        // what REDUCE would have called
    kPersistent,  // what BINPERSID would have fetched
  };

  Kind kind = Kind::kHole;
  uint32_t size = 0;  // bytes of a text, elements of a tuple
  union {
    int64_t integer = 0;  // kInt; kBool: 0 or 1
    double real;          // kFloat
    const char* begin;    // kString, kBytes
    uint64_t index;       // containers and objects: where in the Pickle
    uint32_t global;      // kGlobal: the caller's number
  };

  bool is(Kind wanted) const { return kind == wanted; }
  /// Of a string or bytes; empty for anything else.
  std::string_view text() const {
    return is(Kind::kString) || is(Kind::kBytes) ? std::string_view(begin, size) : std::string_view();
  }
};

/// An object as it was pickled, not made.
struct PickleObject {
  uint32_t global = 0;  // class or function: the caller's number; of a persistent id 0
  PickleValue args;     // a tuple; of a persistent id: the id
  PickleValue state;    // of BUILD, or a hole
};

struct PickleSpan {
  const PickleValue* first = nullptr;
  size_t count = 0;

  const PickleValue* begin() const { return first; }
  const PickleValue* end() const { return first + count; }
  size_t size() const { return count; }
  const PickleValue& operator[](size_t i) const { return first[i]; }
};

/// The values of one pickle. Memo references make them a graph, not a tree: a value may stand in any number of places,
/// and lists, dicts and objects may hold themselves. Whoever walks it bounds depth and steps (pickle_tree.h).
class Pickle {
 public:
  struct Arena {
    std::vector<PickleValue> tuples;  // elements, tuple after tuple
    std::vector<std::vector<PickleValue>> lists;
    std::vector<PickleObject> objects;
  };

  Pickle(Arena arena, PickleValue root, size_t end) : arena_(std::move(arena)), root_(root), end_(end) {}

  const PickleValue& root() const { return root_; }
  /// Bytes up to and with STOP. Whether something may follow is for the caller to say.
  size_t end() const { return end_; }

  /// Elements of a tuple or list; of a dict keys and values in turn, as set, so that of equal keys the last counts.
  /// Empty for anything else.
  PickleSpan children(const PickleValue& value) const;
  /// Of kObject, kCall, kPersistent; nullptr for anything else.
  const PickleObject* object(const PickleValue& value) const;
  /// The object if `value` is of this kind and this global; else nullptr.
  const PickleObject* object(const PickleValue& value, PickleValue::Kind kind, uint32_t global) const;

 private:
  Arena arena_;
  PickleValue root_;
  size_t end_;
};

/// What a reader of pickles lets in.
struct PickleRules {
  /// The caller's number for a global that may be named, nullopt for one that may not.
  std::function<std::optional<uint32_t>(std::string_view module, std::string_view name)> global;
  bool persistent_ids = false;
};

/// Interprets the opcodes of a pickle as descriptions of values. Nothing is imported, called or instantiated.
///
/// Knows what the picklers of DCP and torch.save emit, protocols 2 to 5, and nothing that only other pickles need.
/// \returns kUnsupported for an opcode outside that, a global that the rules do not let in, or an int beyond 64 bits;
///   kCorrupt for what no pickler writes. The message names opcode or global and its byte.
/// Linear in time and memory, whatever the bytes are.
base::Result<Pickle> read_pickle(std::string_view bytes, const PickleRules& rules);

}  // namespace bytecheckpoint::format
