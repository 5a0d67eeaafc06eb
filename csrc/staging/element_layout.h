// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "csrc/base/host_device.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::staging {

/// A strided tensor as equal units in row-major order, in a form that device code can read.
///
/// A unit is what is moved at once: several elements where they lie side by side, a part of one where its address
/// permits no more. Packed, a tensor is its units one behind another and then its tail: all its bytes, row-major.
struct ElementLayout {
  static constexpr int kMaxDims = 8;

  uint8_t* data;                    // unit 0
  int64_t num_units;                // 0 only if there are no bytes at all
  int32_t unit_bytes;               // 1, 2, 4, 8 or 16; divides the address of every unit
  int32_t tail_bytes;               // fewer than a unit, behind the last one; 0 unless the tensor is contiguous
  int32_t num_dims;                 // none has size 1, and none continues its neighbour
  int64_t sizes[kMaxDims];          // in units, outermost first
  int64_t strides_bytes[kMaxDims];  // 0 where expanded; may be negative
};

/// \param view  Of a plain dtype. Its byte size fits in int64.
/// \returns nothing if more than kMaxDims dims are left after neighbours were joined.
std::optional<ElementLayout> layout_of(const tensor::StridedView& view);

BCP_HOST_DEVICE inline int64_t packed_bytes(const ElementLayout& layout) {
  return layout.num_units * layout.unit_bytes + layout.tail_bytes;
}

/// Are the bytes in memory the packed ones?
BCP_HOST_DEVICE inline bool is_contiguous(const ElementLayout& layout) {
  return layout.num_dims == 0 || (layout.num_dims == 1 && layout.strides_bytes[0] == layout.unit_bytes);
}

/// Bytes from `data` to a unit.
BCP_HOST_DEVICE inline int64_t offset_of(const ElementLayout& layout, int64_t unit) {
  if (layout.num_dims == 0) return 0;
  int64_t offset = 0;
  for (int d = layout.num_dims - 1; d > 0; --d) {
    const int64_t size = layout.sizes[d];
    // Devices have no instruction that divides; 64 bits cost them several times what 32 bits do.
    const int64_t outer =
        ((unit | size) >> 32) == 0 ? static_cast<uint32_t>(unit) / static_cast<uint32_t>(size) : unit / size;
    offset += (unit - outer * size) * layout.strides_bytes[d];
    unit = outer;
  }
  return offset + unit * layout.strides_bytes[0];
}

/// A share of one tensor's units, the work of one block of threads. The share that ends with the last unit has the
/// tail.
struct Tile {
  int64_t first_unit;
  uint32_t num_units;
  uint32_t piece;  // which tensor
};

/// What a tile has at most, tail apart. Enough for each of 256 threads to move 16 bytes four times, and little enough
/// that one tensor of a few MiB occupies a whole device.
inline constexpr int64_t kTileBytes = 16 << 10;

BCP_HOST_DEVICE inline bool has_tail(const ElementLayout& layout, const Tile& tile) {
  return tile.first_unit + tile.num_units == layout.num_units;
}
BCP_HOST_DEVICE inline int64_t tile_bytes(const ElementLayout& layout, const Tile& tile) {
  return static_cast<int64_t>(tile.num_units) * layout.unit_bytes + (has_tail(layout, tile) ? layout.tail_bytes : 0);
}

namespace internal {

// What one load and one store move. They alias every type, because tensors are of every type.
struct __attribute__((may_alias, aligned(16))) Word16 {
  uint64_t low, high;
};
template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  typedef uint8_t Type __attribute__((may_alias));
};
template <>
struct WordOf<2> {
  typedef uint16_t Type __attribute__((may_alias));
};
template <>
struct WordOf<4> {
  typedef uint32_t Type __attribute__((may_alias));
};
template <>
struct WordOf<8> {
  typedef uint64_t Type __attribute__((may_alias));
};
template <>
struct WordOf<16> {
  using Type = Word16;
};

/// Moves a tile in words of kBytes, which divides the unit and all addresses. Neighbouring threads take neighbouring
/// words of the packed side, so that a device makes few and wide accesses there.
template <int kBytes, bool kGather>
BCP_HOST_DEVICE inline void move_units(const ElementLayout& layout, const Tile& tile, uint8_t* packed, uint32_t thread,
                                       uint32_t num_threads) {
  using Word = typename WordOf<kBytes>::Type;
  int words_log2 = 0;  // of a unit
  while ((kBytes << words_log2) < layout.unit_bytes) ++words_log2;
  const int64_t num_words = static_cast<int64_t>(tile.num_units) << words_log2;
  for (int64_t w = thread; w < num_words; w += num_threads) {
    const int64_t unit = w >> words_log2;
    uint8_t* in_memory = layout.data + offset_of(layout, tile.first_unit + unit) + (w - (unit << words_log2)) * kBytes;
    uint8_t* in_packed = packed + w * kBytes;
    if (kGather) {
      *reinterpret_cast<Word*>(in_packed) = *reinterpret_cast<const Word*>(in_memory);
    } else {
      *reinterpret_cast<Word*>(in_memory) = *reinterpret_cast<const Word*>(in_packed);
    }
  }
}

template <bool kGather>
BCP_HOST_DEVICE inline void move_tile(const ElementLayout& layout, const Tile& tile, uint8_t* packed, uint32_t thread,
                                      uint32_t num_threads) {
  int32_t width = layout.unit_bytes;
  while (reinterpret_cast<uintptr_t>(packed) % static_cast<uint32_t>(width) != 0) width /= 2;
  switch (width) {
    case 16:
      move_units<16, kGather>(layout, tile, packed, thread, num_threads);
      break;
    case 8:
      move_units<8, kGather>(layout, tile, packed, thread, num_threads);
      break;
    case 4:
      move_units<4, kGather>(layout, tile, packed, thread, num_threads);
      break;
    case 2:
      move_units<2, kGather>(layout, tile, packed, thread, num_threads);
      break;
    default:
      move_units<1, kGather>(layout, tile, packed, thread, num_threads);
  }
  if (!has_tail(layout, tile)) return;
  uint8_t* tail_in_memory =
      layout.data + layout.num_units * layout.unit_bytes;  // a tail is of contiguous tensors alone
  uint8_t* tail_in_packed = packed + static_cast<int64_t>(tile.num_units) * layout.unit_bytes;
  for (int32_t i = static_cast<int32_t>(thread); i < layout.tail_bytes; i += static_cast<int32_t>(num_threads)) {
    if (kGather) {
      tail_in_packed[i] = tail_in_memory[i];
    } else {
      tail_in_memory[i] = tail_in_packed[i];
    }
  }
}

}  // namespace internal

/// Copies what is thread `thread`'s of a tile from the tensor to its packed form. All of `num_threads` together copy
/// all of it, in any order and at any time: no two write the same byte.
///
/// \param packed  Where the first byte of the tile goes, at any alignment; fastest where unit_bytes divides it.
BCP_HOST_DEVICE inline void gather_tile(const ElementLayout& layout, const Tile& tile, uint8_t* packed, uint32_t thread,
                                        uint32_t num_threads) {
  internal::move_tile<true>(layout, tile, packed, thread, num_threads);
}

/// The reverse. The tensor is not expanded: of elements that share memory any one would win.
BCP_HOST_DEVICE inline void scatter_tile(const ElementLayout& layout, const Tile& tile, const uint8_t* packed,
                                         uint32_t thread, uint32_t num_threads) {
  internal::move_tile<false>(layout, tile, const_cast<uint8_t*>(packed), thread, num_threads);  // read only
}

}  // namespace bytecheckpoint::staging
