// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/wanted_box.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "csrc/engine/load/dequantization.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::engine {
namespace {

/// Returns the dims in the order in which they are stored, outermost first; nothing if they are in that order.
std::vector<size_t> stored_order(const tensor::Dims& strides) {
  if (std::is_sorted(strides.begin(), strides.end(), std::greater<>())) return {};
  std::vector<size_t> order(strides.size());
  std::iota(order.begin(), order.end(), size_t{0});
  // Dims of one element may have any stride; wherever they stand, they change nothing.
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return strides[a] > strides[b]; });
  return order;
}

tensor::Dims ordered(const tensor::Dims& dims, const std::vector<size_t>& order) {
  if (order.empty()) return dims;
  tensor::Dims out(order.size());
  for (size_t d = 0; d < order.size(); ++d) out[d] = dims[order[d]];
  return out;
}

}  // namespace

tensor::Dims in_stored_order(const TensorPlace& place, const tensor::Dims& dims) {
  return ordered(dims, stored_order(place.strides));
}

bool cuts_elements(const TensorPlace& place) {
  return place.data_offset % tensor::find_dtype(place.dtype)->itemsize_bytes != 0;
}

planner::WantedBox wanted_of(const format::Chunk& chunk, const TensorPlace& place, const tensor::Box& box) {
  if (place.codes != nullptr) return wanted_codes_of(chunk, place, box);
  const int64_t itemsize = tensor::find_dtype(place.dtype)->itemsize_bytes;
  const std::vector<size_t> order = stored_order(place.strides);
  planner::WantedBox wanted{chunk.record.file, place.data_offset, ordered(box.sizes, order),
                            ordered(place.strides, order), itemsize};
  if (!tensor::has_elements(box)) return wanted;  // strides mean nothing
  for (int64_t& stride : wanted.strides_bytes) stride *= itemsize;
  for (size_t d = 0; d < box.num_dims(); ++d) wanted.offset += box.offsets[d] * place.strides[d] * itemsize;
  if (cuts_elements(place)) {
    wanted.sizes.push_back(itemsize);
    wanted.strides_bytes.push_back(1);
    wanted.itemsize_bytes = 1;
  }
  return wanted;
}

planner::WantedBox wanted_of(const format::Record& record) {
  return {record.file, record.offset, {record.bytes}, {1}, 1};
}

}  // namespace bytecheckpoint::engine
