// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/bridge/dims_caster.h"
#include "csrc/bridge/errors.h"
#include "csrc/staging/element_layout.h"
#include "csrc/staging/merge_pieces.h"
#include "csrc/testing/bindings.h"

namespace bytecheckpoint::testing {
namespace {

namespace py = pybind11;
using namespace bridge;

using base::Code;
using base::Status;
using tensor::Dims;

/// (address, dtype, sizes, strides in elements) of a tensor that the caller keeps alive.
using TensorInMemory = std::tuple<uintptr_t, std::string, Dims, Dims>;

tensor::StridedView view_of(const TensorInMemory& held) {
  const auto& [address, name, sizes, strides] = held;
  const tensor::DTypeInfo* dtype = tensor::find_dtype(std::string_view(name));
  if (dtype == nullptr) raise(Status::make(Code::kInvalidArgument, base::text("dtype ", name)));
  tensor::StridedView view{reinterpret_cast<uint8_t*>(address), dtype->dtype, sizes, strides};
  for (int64_t& stride : view.strides_bytes) stride *= dtype->itemsize_bytes;
  return view;
}

/// Does on the host what a kernel does, with the same code, so that its index arithmetic can be tested without a
/// device.
/// \param merged  Address of as many bytes as the tensors fill in merged memory.
/// \param move    `gather_tile` or `scatter_tile`.
template <class Move>
void move_tiles(const std::vector<TensorInMemory>& tensors, uintptr_t merged, int64_t alignment, int64_t units_a_tile,
                uint32_t num_threads, const Move& move) {
  std::vector<tensor::StridedView> views;
  for (const TensorInMemory& held : tensors) views.push_back(view_of(held));
  std::vector<staging::Piece> pieces;
  int64_t num_bytes = 0;
  if (!staging::lay_out(std::move(views), {alignment, alignment}, &pieces, &num_bytes)) {
    raise(Status::make(Code::kInvalidArgument, "tensors: more bytes than can be counted"));
  }
  for (const staging::Piece& piece : pieces) {
    const auto layout = staging::layout_of(piece.view);
    if (!layout.has_value()) raise(Status::make(Code::kUnsupported, "a tensor has too many dims for a kernel"));
    for (int64_t first = 0; first < layout->num_units; first += units_a_tile) {
      const int64_t num_units = std::min(units_a_tile, layout->num_units - first);
      const staging::Tile tile{first, static_cast<uint32_t>(num_units), 0};
      uint8_t* const packed = reinterpret_cast<uint8_t*>(merged) + piece.offset + first * layout->unit_bytes;
      for (uint32_t thread = 0; thread < num_threads; ++thread) move(*layout, tile, packed, thread, num_threads);
    }
  }
}

}  // namespace

void bind_tiles(py::module_& m) {
  m.def(
      "merge_by_tiles",
      [](const std::vector<TensorInMemory>& tensors, uintptr_t merged, int64_t alignment, int64_t units_a_tile,
         uint32_t num_threads) {
        move_tiles(tensors, merged, alignment, units_a_tile, num_threads, &staging::gather_tile);
      },
      py::arg("tensors"), py::arg("merged"), py::arg("alignment"), py::arg("units_a_tile"), py::arg("num_threads"));
  m.def(
      "scatter_by_tiles",
      [](const std::vector<TensorInMemory>& tensors, uintptr_t merged, int64_t alignment, int64_t units_a_tile,
         uint32_t num_threads) {
        move_tiles(tensors, merged, alignment, units_a_tile, num_threads, &staging::scatter_tile);
      },
      py::arg("tensors"), py::arg("merged"), py::arg("alignment"), py::arg("units_a_tile"), py::arg("num_threads"));
}

}  // namespace bytecheckpoint::testing
