// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>
#include <vector>

namespace bytecheckpoint::base {

/// An array that grows and shrinks at its end, in chunks of 4 KiB.
///
/// Growing copies no element, so the array never takes more memory than its elements and about one chunk. A std::vector
/// takes three times the memory of its elements while it grows. References to elements stay valid until the element is
/// removed.
template <class T>
class ChunkedArray {
 public:
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

  size_t size() const { return size_; }
  /// Bytes of memory that the array takes, spare room included.
  size_t num_bytes() const { return chunks_.size() * kChunk * sizeof(T); }

  T& operator[](size_t i) { return chunks_[i / kChunk][i % kChunk]; }
  const T& operator[](size_t i) const { return chunks_[i / kChunk][i % kChunk]; }
  T& back() { return (*this)[size_ - 1]; }
  const T& back() const { return (*this)[size_ - 1]; }

  void push_back(const T& value) {
    if (size_ == chunks_.size() * kChunk) chunks_.emplace_back(new T[kChunk]);
    (*this)[size_++] = value;
  }

  /// Removes all elements from number `size` on. One chunk is kept as spare, because a stack often grows again at once.
  void truncate(size_t size) {
    size_ = size;
    while (chunks_.size() > num_chunks(size) + 1) chunks_.pop_back();
  }

  /// Moves all elements from number `first` on to the end of `other`, in order. Each chunk is freed once it has been
  /// moved, so that both arrays together take only one or two chunks more than the elements.
  template <class Other>
  void move_tail(size_t first, ChunkedArray<Other>* other) {
    for (size_t i = first; i < size_; ++i) {
      other->push_back(Other((*this)[i]));
      const size_t chunk = i / kChunk;
      if (i % kChunk == kChunk - 1 && chunk > num_chunks(first)) chunks_[chunk].reset();
    }
    truncate(first);
  }

 private:
  static constexpr size_t kChunk = 4096 / sizeof(T);

  static size_t num_chunks(size_t size) { return (size + kChunk - 1) / kChunk; }

  std::vector<std::unique_ptr<T[]>> chunks_;
  size_t size_ = 0;
};

}  // namespace bytecheckpoint::base
