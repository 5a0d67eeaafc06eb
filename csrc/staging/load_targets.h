// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::staging {

/// Stands for the host among the numbers of devices.
inline constexpr int kHost = -1;

/// The memory of a tensor, or of a part of one.
struct TensorMemory {
  int device = kHost;
  tensor::StridedView view;
};

/// Parts of tensors that a load is to fill, each with a number. A load fills them in any order, with several threads.
/// So of tensors that share memory, like tied ones, only the first one is filled there; the others are left to whoever
/// fills them behind it, one after the other, so that the last one counts as a whole:
///
///     memory   |  a  |      |  b        |   |  d  |      a, b and d are filled in any order, then c
///                                |  c  |
class LoadTargets {
 public:
  struct Part {
    size_t number;
    TensorMemory memory;
  };

  /// Adds a part.
  /// \param tensor  Number of its tensor, whose parts share no memory with each other. At most one more than any
  /// before.
  /// \param whole   Memory of the tensor in which this part lies; may be another one for another part.
  void add(size_t number, TensorMemory part, size_t tensor, const TensorMemory& whole);
  /// Adds a part that others fill afterwards, for whatever reason: its tensor comes before those that share its memory.
  void leave_out(size_t number, size_t tensor, const TensorMemory& whole);
  /// Returns the parts that may be filled in any order: those of tensors that share no memory with a tensor of a lower
  /// number, and of which no two elements share memory. Memory counts from the first to the last byte, so tensors that
  /// interleave share it. Leaves nothing here.
  /// \param left_out  Receives the numbers of all other parts. Fill these afterwards, in their order.
  std::vector<Part> take_apart(std::vector<size_t>* left_out);

 private:
  struct Range {
    size_t tensor;
    int device;
    const uint8_t* first;
    const uint8_t* behind;
    bool is_left_out;  // its parts
  };
  Range& range_of(size_t tensor, const TensorMemory& whole);
  /// Leaves out what shares memory with a tensor before it.
  void find_shared();

  std::vector<Part> parts_;
  std::vector<size_t> left_out_;
  std::vector<size_t> tensors_;  // of each part, its tensor
  std::vector<Range> ranges_;    // of each tensor
};

}  // namespace bytecheckpoint::staging
