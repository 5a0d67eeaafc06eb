// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <utility>

namespace bytecheckpoint::tensor {

/// One number per dim of a tensor: sizes, offsets or strides.
///
/// Up to four numbers are stored in the object itself, more on the heap. Plans and manifests hold millions of these
/// objects, and nearly all tensors have at most four dims.
///
/// Has the methods of std::vector<int64_t> that are used here, with the same rules: growing invalidates pointers to the
/// numbers, and an object that was moved from is empty.
class Dims {
 public:
  using value_type = int64_t;
  using size_type = size_t;
  using iterator = int64_t*;
  using const_iterator = const int64_t*;

  static constexpr size_t kInlineDims = 4;

  Dims() = default;
  explicit Dims(size_t count, int64_t value = 0) { assign(count, value); }
  Dims(std::initializer_list<int64_t> values) : Dims(values.begin(), values.end()) {}
  template <class Iterator, class = typename std::iterator_traits<Iterator>::iterator_category>
  Dims(Iterator first, Iterator last) {
    const auto count = static_cast<size_t>(std::distance(first, last));
    std::copy(first, last, make_room(count));
    size_ = static_cast<uint32_t>(count);
  }
  Dims(const Dims& other) { copy_from(other); }
  Dims(Dims&& other) noexcept { take_from(&other); }
  Dims& operator=(const Dims& other) {
    if (this != &other) copy_from(other);
    return *this;
  }
  Dims& operator=(Dims&& other) noexcept {
    if (this == &other) return *this;
    release();
    take_from(&other);
    return *this;
  }
  ~Dims() { release(); }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  size_t capacity() const { return capacity_; }

  int64_t* data() { return is_inline() ? place_.here : place_.heap; }
  const int64_t* data() const { return is_inline() ? place_.here : place_.heap; }
  int64_t* begin() { return data(); }
  int64_t* end() { return data() + size_; }
  const int64_t* begin() const { return data(); }
  const int64_t* end() const { return data() + size_; }
  int64_t& operator[](size_t d) { return data()[d]; }
  int64_t operator[](size_t d) const { return data()[d]; }
  int64_t& back() { return data()[size_ - 1]; }
  int64_t back() const { return data()[size_ - 1]; }

  void clear() { size_ = 0; }
  void reserve(size_t count) {
    if (count > capacity_) grow(count);
  }
  /// New numbers are 0.
  void resize(size_t count) {
    reserve(count);
    if (count > size_) std::fill(end(), data() + count, 0);
    size_ = static_cast<uint32_t>(count);
  }
  void assign(size_t count, int64_t value) {
    std::fill_n(make_room(count), count, value);
    size_ = static_cast<uint32_t>(count);
  }
  void push_back(int64_t value) {
    if (size_ == capacity_) grow(2 * static_cast<size_t>(capacity_));
    data()[size_++] = value;
  }

  friend bool operator==(const Dims& a, const Dims& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }
  friend bool operator!=(const Dims& a, const Dims& b) { return !(a == b); }
  /// Lexicographic order.
  friend bool operator<(const Dims& a, const Dims& b) {
    return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  bool is_inline() const { return capacity_ == kInlineDims; }

  void release() {
    if (!is_inline()) std::allocator<int64_t>().deallocate(place_.heap, capacity_);
  }
  /// Drops the numbers and returns memory for `count` new ones.
  int64_t* make_room(size_t count) {
    clear();
    reserve(count);
    return data();
  }
  void grow(size_t count) {
    int64_t* heap = std::allocator<int64_t>().allocate(count);
    std::copy(begin(), end(), heap);
    release();
    place_.heap = heap;
    capacity_ = static_cast<uint32_t>(count);
  }
  void copy_from(const Dims& other) {
    if (is_inline() && other.is_inline()) {
      place_ = other.place_;  // all of it: a copy of fixed length is a few instructions
    } else {
      std::copy(other.begin(), other.end(), make_room(other.size_));
    }
    size_ = other.size_;
  }
  void take_from(Dims* other) {
    place_ = other->place_;
    capacity_ = std::exchange(other->capacity_, kInlineDims);
    size_ = std::exchange(other->size_, 0);
  }

  uint32_t size_ = 0;
  uint32_t capacity_ = kInlineDims;
  union {
    int64_t here[kInlineDims];
    int64_t* heap;  // owned
  } place_ = {};
};

static_assert(sizeof(Dims) == 40, "millions are held at a time");

}  // namespace bytecheckpoint::tensor
