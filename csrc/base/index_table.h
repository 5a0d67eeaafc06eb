// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bytecheckpoint::base {

/// Returns a hash of a number whose lowest bits vary little: a pointer, an id, a running number.
inline uint64_t spread_hash(uint64_t number) {
  const uint64_t hash = number * uint64_t{0x9E3779B97F4A7C15};
  return hash ^ hash >> 32;
}

/// A hash table of indices into an array that somebody else owns: it finds an index by the hash of the element there.
///
/// It uses open addressing and allocates nothing per entry. It keeps only indices and hashes, so the array may move and
/// grow. Not thread-safe.
class IndexTable {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  /// Returns the index that was inserted with `hash` and for which `is_same(index)` is true; kNone if there is none.
  /// O(1) on average.
  template <class IsSame>
  uint32_t find(uint64_t hash, IsSame&& is_same) const {
    if (slots_.empty()) return kNone;
    for (size_t at = hash & mask();; at = (at + 1) & mask()) {
      if (slots_[at].index == kNone) return kNone;
      if (slots_[at].hash == hash && is_same(slots_[at].index)) return slots_[at].index;
    }
  }

  /// Adds an index.
  /// \param index  Not kNone, and not in the table yet.
  void insert(uint64_t hash, uint32_t index) {
    if (2 * (size_ + 1) > slots_.size()) grow();
    place(Slot{hash, index});
    ++size_;
  }

  size_t size() const { return size_; }

 private:
  struct Slot {
    uint64_t hash = 0;
    uint32_t index = kNone;
  };

  size_t mask() const { return slots_.size() - 1; }
  void place(Slot slot) {
    size_t at = slot.hash & mask();
    while (slots_[at].index != kNone) at = (at + 1) & mask();
    slots_[at] = slot;
  }
  void grow() {
    std::vector<Slot> old(slots_.empty() ? 16 : 2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.index != kNone) place(slot);
    }
  }

  std::vector<Slot> slots_;  // their number is a power of two; at most half are in use
  size_t size_ = 0;
};

}  // namespace bytecheckpoint::base
