// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::staging {

/// A tensor as it is now, and a row-major copy of what it was: as many bytes, of the same shape and dtype.
struct Compared {
  tensor::StridedView now;
  const uint8_t* before = nullptr;
};

/// Bytes of one position of a box of `numel` elements: 4, or 8 where 4 do not suffice.
inline int64_t position_bytes(int64_t numel) {
  return numel > (int64_t{1} << 32) ? 8 : 4;
}

/// Where tensors differ from their copies, and the values that they have there now. Elements are compared by their
/// bits: -0.0 differs from 0.0, and a NaN is equal to a NaN of the same bits alone.
///
///     before      |a|b|c|d|e|        of one box, row-major
///     now         |a|x|c|d|y|        any strides
///     positions   |1|4|              ascending; 4 or 8 bytes each, little-endian
///     values      |x|y|
class Changes {
 public:
  /// Compares in up to `num_threads` threads, which read each byte of both sides once.
  /// \param most_bytes  Bytes of positions and values together after which the search is given up.
  /// \returns nothing if it was given up.
  static std::optional<Changes> find(const std::vector<Compared>& tensors, int num_threads, int64_t most_bytes);

  Changes(Changes&&) noexcept;
  Changes& operator=(Changes&&) noexcept;
  ~Changes();

  size_t num_tensors() const { return tensors_.size(); }
  /// Returns how many elements of a tensor have changed.
  int64_t count(size_t number) const { return tensors_[number].count; }
  int64_t itemsize_bytes(size_t number) const { return tensors_[number].itemsize_bytes; }
  /// Bytes of one position of a tensor; see `position_bytes` above.
  int64_t position_bytes(size_t number) const { return tensors_[number].position_bytes; }
  /// Writes `count(number)` positions and as many values.
  void write(size_t number, uint8_t* positions, uint8_t* values) const;

 private:
  struct Found;  // what one stretch of one tensor has
  struct OfTensor {
    int64_t itemsize_bytes = 0;
    int64_t position_bytes = 0;
    int64_t count = 0;
    size_t first = 0, end = 0;  // its stretches
  };
  Changes() = default;

  std::vector<OfTensor> tensors_;
  std::vector<Found> found_;
};

/// Changes of one box of a tensor, and memory that holds the same or another box of it.
struct Patch {
  tensor::Box from;  // the box in which positions count; both boxes are of one tensor
  const uint8_t* positions = nullptr;
  int64_t position_bytes = 4;
  const uint8_t* values = nullptr;
  int64_t count = 0;
  tensor::Box to;              // the box that `memory` holds
  tensor::StridedView memory;  // any strides, but no element twice
};

/// Checks what came from storage: positions must ascend, and lie in the box.
/// \returns kCorrupt otherwise, with the first position that does not.
base::Status check_positions(const Patch& patch);

/// Writes the values of those positions that lie in `to`, in up to `num_threads` threads. All patches must have passed
/// `check_positions`, and no two of them may write the same element.
void apply_patches(const std::vector<Patch>& patches, int num_threads);

}  // namespace bytecheckpoint::staging
