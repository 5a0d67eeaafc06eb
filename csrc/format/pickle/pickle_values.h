// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "csrc/base/chunked_array.h"

namespace bytecheckpoint::format {

/// One value that a pickle builds, in 8 bytes.
///
/// An opcode of one byte makes a value, so there may be as many values as the pickle has bytes. To keep values small,
/// numbers and texts stay in the pickle, and containers and objects are references to cells. Everything else about a
/// value is asked of the Pickle.
struct PickleValue {
  enum class Kind : uint8_t {
    kHole,  // no value: stands for an attribute that is missing
    kNone,
    kBool,
    kInt,
    kFloat,
    kString,  // UTF-8
    kBytes,
    kTuple,
    kList,
    kDict,
    kGlobal,      // a name; what it names was never looked up
    kObject,      // what NEWOBJ would make of a class
    kCall,        // what REDUCE would call
    kPersistent,  // what BINPERSID would fetch
    // Only if PickleRules::standard_types is set:
    kLong,  // an int beyond 64 bits
    kByteArray,
    kSet,
    kFrozenSet,
  };

  PickleValue() : size(0) {}
  explicit PickleValue(Kind kind, uint32_t at = 0, uint32_t size = 0) : kind(kind), size(size), at(at) {}

  bool is(Kind wanted) const { return kind == wanted; }
  /// Only for kBool.
  bool is_true() const { return at != 0; }
  /// Only for kGlobal: the caller's number.
  uint32_t global() const { return at; }

  Kind kind = Kind::kHole;
  uint32_t size : 24;  // of a tuple: number of its elements, if they are few
  uint32_t at = 0;     // kBool, kGlobal: the number; scalars: offset of their opcode in the pickle; others: a cell
};
static_assert(sizeof(PickleValue) == 8, "as many are held as a pickle has bytes");

/// Returns the string or bytes whose opcode stands at byte `at` of a pickle that was read.
std::string_view text_at(std::string_view pickle, uint32_t at);

/// An object as the pickle describes it. It was not made.
struct PickleObject {
  uint32_t global = 0;  // the caller's number of the class or function; 0 for a persistent id
  PickleValue args;     // a tuple; the id itself for a persistent id
  PickleValue state;    // the argument of BUILD, or a hole
  PickleValue items;    // a list or dict of the values that APPENDS or SETITEMS put into it, or a hole
};

/// One of the 8-byte cells in which tuples, lists, sets, dicts and objects are stored: a value, or a link.
union PickleCell {
  struct Link {
    uint32_t count;
    uint32_t other;  // number of a cell, or 0 for none
  };

  PickleCell() : link{0, 0} {}
  explicit PickleCell(const PickleValue& value) : value(value) {}
  PickleCell(uint32_t count, uint32_t other) : link{count, other} {}

  PickleValue value;
  Link link;
};
using PickleCells = base::ChunkedArray<PickleCell>;

/// The elements of a container, in order. Valid as long as the Pickle.
class PickleSpan {
 public:
  class Iterator {
   public:
    Iterator(const PickleSpan& span, uint32_t left) : cells_(span.cells_), at_(span.first_), left_(left) {
      run_left_ = span.next_ == 0 ? left : span.run_;
      next_ = span.next_;
    }
    const PickleValue& operator*() const { return (*cells_)[at_].value; }
    Iterator& operator++() {
      --left_, ++at_;
      if (--run_left_ == 0 && left_ != 0) {
        const PickleCell::Link run = (*cells_)[next_].link;
        at_ = next_ + 1, run_left_ = run.count, next_ = run.other;
      }
      return *this;
    }
    /// Both iterators must be of one span.
    bool operator!=(const Iterator& other) const { return left_ != other.left_; }

   private:
    const PickleCells* cells_;
    uint32_t at_, run_left_, next_, left_;
  };

  PickleSpan() = default;
  /// The `run` values from cell `first` on, then those of the runs from cell `next` on; `count` values in all.
  PickleSpan(const PickleCells& cells, uint32_t first, uint32_t run, uint32_t next, uint32_t count)
      : cells_(&cells), first_(first), run_(run), next_(next), count_(count) {}

  Iterator begin() const { return {*this, count_}; }
  Iterator end() const { return {*this, 0}; }
  size_t size() const { return count_; }
  /// O(1) for a tuple. For a list or dict it walks from run to run.
  const PickleValue& operator[](size_t i) const;

 private:
  const PickleCells* cells_ = nullptr;
  uint32_t first_ = 0, run_ = 0, next_ = 0, count_ = 0;
};

/// The containers and objects of a pickle, while they are made and afterwards.
///
/// A tuple is a run of values. A list or dict may grow while other values are made, so it is a ring of runs:
///
///     its own cell   [number of all values | last run]
///     each run       [number of its values | next run] value value ...       the next of the last run is the first run
///
/// An empty list has no own cell while only the stack refers to it.
class PickleArena {
 public:
  using Stack = base::ChunkedArray<PickleValue>;

  PickleArena() { cells_.push_back(PickleCell()); }  // cell 0 is never used: 0 means none

  /// Makes a tuple of all values on the stack from number `first` on, and removes them from the stack.
  PickleValue add_tuple(Stack* stack, size_t first);
  /// Does the same for a kFrozenSet.
  PickleValue add_frozen_set(Stack* stack, size_t first);
  /// Moves all values on the stack from number `first` on to the end of a list, dict or set.
  /// \param list  If it has no cell yet it gets one; then every copy of this value is outdated and must be replaced.
  void extend(PickleValue* list, Stack* stack, size_t first);
  /// Gives a list, dict or set its own cell if it has none. Must be called before a second place refers to it. Leaves
  /// other values alone.
  void share(PickleValue* value);
  /// Makes an object without state and items.
  /// \param kind  kObject or kCall.
  PickleValue add_object(PickleValue::Kind kind, uint32_t global, const PickleValue& args);
  PickleValue add_persistent(const PickleValue& id);
  void set_state(const PickleValue& object, const PickleValue& state) { cells_[object.at + 2].value = state; }
  /// Moves all values on the stack from number `first` on into an object.
  /// \param kind  kList or kDict.
  /// \returns false if the object was filled as the other kind before.
  bool fill(const PickleValue& object, PickleValue::Kind kind, Stack* stack, size_t first);

  PickleSpan children(const PickleValue& value) const;
  std::optional<PickleObject> object(const PickleValue& value) const;
  /// Number of cells; greater than any cell number in a value.
  size_t size() const { return cells_.size(); }
  size_t num_bytes() const { return cells_.num_bytes(); }

 private:
  /// A tuple with so many elements or more has a cell before them with their number.
  static constexpr uint32_t kManyElements = (1 << 24) - 1;

  uint32_t next_cell() const { return static_cast<uint32_t>(cells_.size()); }

  PickleCells cells_;
};

/// The values of one pickle.
///
/// Memo references make the values a graph, not a tree: a value may stand in any number of places, and lists, dicts and
/// objects may contain themselves. Code that walks the graph must limit depth and steps (pickle_tree.h).
/// Immutable, so thread-safe. Refers to the bytes that were read, which must outlive it.
class Pickle {
 public:
  Pickle(std::string_view bytes, PickleArena arena, PickleValue root, size_t end)
      : bytes_(bytes), arena_(std::move(arena)), root_(root), end_(end) {}

  const PickleValue& root() const { return root_; }
  /// Number of bytes up to and including STOP. The caller decides whether more bytes may follow.
  size_t end() const { return end_; }
  /// Number of bytes that were read.
  size_t num_bytes() const { return bytes_.size(); }
  const PickleArena& arena() const { return arena_; }

  /// Returns the number of a kInt.
  int64_t integer(const PickleValue& value) const;
  /// Returns the number of a kFloat.
  double real(const PickleValue& value) const;
  /// Returns a part of the bytes that were read: the text of a string, the content of bytes or of a bytearray, or the
  /// bytes of a kLong (two's complement, little-endian). Empty for other values.
  std::string_view text(const PickleValue& value) const;
  /// Returns the elements of a tuple, list or set; for a dict keys and values in turn, in the order in which they were
  /// set, so that of equal keys the last counts. Empty for other values.
  PickleSpan children(const PickleValue& value) const { return arena_.children(value); }
  /// Returns the object of a kObject, kCall or kPersistent; nothing for other values.
  std::optional<PickleObject> object(const PickleValue& value) const { return arena_.object(value); }
  /// Returns the object if `value` has this kind and this global, else nothing.
  std::optional<PickleObject> object(const PickleValue& value, PickleValue::Kind kind, uint32_t global) const;

 private:
  std::string_view bytes_;
  PickleArena arena_;
  PickleValue root_;
  size_t end_;
};

}  // namespace bytecheckpoint::format
