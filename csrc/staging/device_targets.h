// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
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

/// Parts of tensors on devices that a load is to fill, each with a number. Copies to a device run in any order. So
/// tensors that share memory, like tied ones, are left to whoever fills one after the other:
///
///     memory   |  a  |      |  b        |   |  d  |      a and d are apart
///                                |  c  |                 b and c share memory
class DeviceTargets {
 public:
  struct Part {
    size_t number;
    TensorMemory memory;
  };

  /// Adds a part.
  /// \param tensor  Name of its tensor, whose parts share no memory with each other.
  /// \param whole   Memory of the tensor in which this part lies; may be another one for another part.
  void add(size_t number, TensorMemory part, const std::string& tensor, const TensorMemory& whole);
  /// Returns the parts of tensors whose memory is in no other tensor, and of which no two elements share memory. Memory
  /// counts from the first to the last byte, so tensors that interleave share it. Leaves nothing here.
  /// \param left_out  Receives the numbers of all other parts.
  std::vector<Part> take_apart(std::vector<size_t>* left_out);

 private:
  struct Range {
    int device;
    const uint8_t* first;
    const uint8_t* behind;
    bool is_shared;
  };
  std::vector<Part> parts_;
  std::vector<size_t> tensors_;                    // of each part, its tensor's number in `ranges_`
  std::unordered_map<std::string, size_t> known_;  // these numbers, by name
  std::vector<Range> ranges_;
};

}  // namespace bytecheckpoint::staging
