// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "csrc/base/chunked_array.h"

namespace bytecheckpoint::format {

/// One value that a pickle builds, in 8 bytes: opcodes of one byte make values, and there may be as many of them as the
/// pickle has bytes. So numbers and texts stay where they are, in the pickle, and containers and objects are
/// references. All that takes more to know is asked of the Pickle.
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
    // Only where PickleRules::standard_types lets them in.
    kLong,  // an int beyond 64 bits
    kByteArray,
    kSet,
    kFrozenSet,
  };

  PickleValue() : size(0) {}
  explicit PickleValue(Kind kind, uint32_t at = 0, uint32_t size = 0) : kind(kind), size(size), at(at) {}

  bool is(Kind wanted) const { return kind == wanted; }
  /// kBool
  bool is_true() const { return at != 0; }
  /// kGlobal: the caller's number.
  uint32_t global() const { return at; }

  Kind kind = Kind::kHole;
  uint32_t size : 24;  // of a tuple: its elements, if they are few
  uint32_t at = 0;     // kBool, kGlobal: the number; scalars: their opcode in the pickle; others: a cell of the Pickle
};
static_assert(sizeof(PickleValue) == 8, "as many are held as a pickle has bytes");

/// The string or bytes whose opcode stands at a byte of a pickle that was read.
std::string_view text_at(std::string_view pickle, uint32_t at);

/// An object as it was pickled, not made.
struct PickleObject {
  uint32_t global = 0;  // class or function: the caller's number; of a persistent id 0
  PickleValue args;     // a tuple; of a persistent id: the id
  PickleValue state;    // of BUILD, or a hole
  PickleValue items;    // a list or dict of what APPENDS or SETITEMS filled it with, or a hole
};

/// What tuples, lists, sets, dicts and objects hold: 8 bytes an element, one after the other.
union PickleCell {
  struct Link {
    uint32_t count;
    uint32_t other;  // a cell, or 0 for none
  };

  PickleCell() : link{0, 0} {}
  explicit PickleCell(const PickleValue& value) : value(value) {}
  PickleCell(uint32_t count, uint32_t other) : link{count, other} {}

  PickleValue value;
  Link link;
};
using PickleCells = base::ChunkedArray<PickleCell>;

/// Elements of a container, in order.
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
    /// Of iterators of one span.
    bool operator!=(const Iterator& other) const { return left_ != other.left_; }

   private:
    const PickleCells* cells_;
    uint32_t at_, run_left_, next_, left_;
  };

  PickleSpan() = default;
  /// Values from cell `first` on: `run` of them, then those of the runs from `next` on.
  PickleSpan(const PickleCells& cells, uint32_t first, uint32_t run, uint32_t next, uint32_t count)
      : cells_(&cells), first_(first), run_(run), next_(next), count_(count) {}

  Iterator begin() const { return {*this, count_}; }
  Iterator end() const { return {*this, 0}; }
  size_t size() const { return count_; }
  /// At once in a tuple; in a list or dict from run to run.
  const PickleValue& operator[](size_t i) const;

 private:
  const PickleCells* cells_ = nullptr;
  uint32_t first_ = 0, run_ = 0, next_ = 0, count_ = 0;
};

/// Containers and objects of a pickle, while they are made and when they are looked at.
///
/// A tuple is a run of values. A list or dict grows while other things are made, so it is a ring of runs, each behind a
/// cell with its length and the next run. A cell of its own has the number of all its values and the last run, whose
/// next is the first. An empty one has no such cell as long as nothing but the stack refers to it.
class PickleArena {
 public:
  using Stack = base::ChunkedArray<PickleValue>;

  PickleArena() { cells_.push_back(PickleCell()); }  // none is number 0

  /// A tuple of all that stands on the stack from `first` on; it is taken from there.
  PickleValue add_tuple(Stack* stack, size_t first);
  /// The same as a kFrozenSet.
  PickleValue add_frozen_set(Stack* stack, size_t first);
  /// Moves all that stands on the stack from `first` on to the end of a list or dict.
  /// \param list  Gets a cell of its own if it has none. Then, where it stands, it must be replaced.
  void extend(PickleValue* list, Stack* stack, size_t first);
  /// Before a second place refers to it: a cell for a list or dict that has none. Leaves other values alone.
  void share(PickleValue* value);
  /// \param kind  kObject or kCall.
  PickleValue add_object(PickleValue::Kind kind, uint32_t global, const PickleValue& args);
  PickleValue add_persistent(const PickleValue& id);
  void set_state(const PickleValue& object, const PickleValue& state) { cells_[object.at + 2].value = state; }
  /// Moves all that stands on the stack from `first` on into an object.
  /// \param kind  kList or kDict. False if it holds the other.
  bool fill(const PickleValue& object, PickleValue::Kind kind, Stack* stack, size_t first);

  PickleSpan children(const PickleValue& value) const;
  std::optional<PickleObject> object(const PickleValue& value) const;
  /// Cells: more than any value refers to.
  size_t size() const { return cells_.size(); }
  size_t num_bytes() const { return cells_.num_bytes(); }

 private:
  /// Of a tuple with as many elements or more, a cell before them has their number.
  static constexpr uint32_t kManyElements = (1 << 24) - 1;

  uint32_t next_cell() const { return static_cast<uint32_t>(cells_.size()); }

  PickleCells cells_;
};

/// The values of one pickle. Memo references make them a graph, not a tree: a value may stand in any number of places,
/// and lists, dicts and objects may hold themselves. Whoever walks it bounds depth and steps (pickle_tree.h).
///
/// Refers to the bytes that were read, which must outlive it.
class Pickle {
 public:
  Pickle(std::string_view bytes, PickleArena arena, PickleValue root, size_t end)
      : bytes_(bytes), arena_(std::move(arena)), root_(root), end_(end) {}

  const PickleValue& root() const { return root_; }
  /// Bytes up to and with STOP. Whether something may follow is for the caller to say.
  size_t end() const { return end_; }
  /// Of what was read.
  size_t num_bytes() const { return bytes_.size(); }
  const PickleArena& arena() const { return arena_; }

  /// Of a kInt, a kFloat.
  int64_t integer(const PickleValue& value) const;
  double real(const PickleValue& value) const;
  /// Of a string, bytes or a bytearray, a part of what was read; of a kLong its bytes, little-endian in two's
  /// complement; empty for anything else.
  std::string_view text(const PickleValue& value) const;
  /// Elements of a tuple, list or set; of a dict keys and values in turn, as set, so that of equal keys the last
  /// counts. Empty for anything else.
  PickleSpan children(const PickleValue& value) const { return arena_.children(value); }
  /// Of kObject, kCall, kPersistent; nothing for anything else.
  std::optional<PickleObject> object(const PickleValue& value) const { return arena_.object(value); }
  /// The object if `value` is of this kind and this global; else nothing.
  std::optional<PickleObject> object(const PickleValue& value, PickleValue::Kind kind, uint32_t global) const;

 private:
  std::string_view bytes_;
  PickleArena arena_;
  PickleValue root_;
  size_t end_;
};

}  // namespace bytecheckpoint::format
