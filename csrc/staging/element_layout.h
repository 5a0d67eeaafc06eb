// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "csrc/base/host_device.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::staging {

/// A strided tensor as a sequence of equal units in row-major order, in a form that device code can read.
///
/// A unit is what can be moved at once: several elements if they are contiguous and aligned, a part of one element if
/// its address is not aligned to more. The packed form of a tensor is its units, one after the other, and then its
/// tail: all its bytes, row-major.
///
///     memory   |u0|u1|..|u2|u3|..|u4|u5|      strided: sizes {3, 2}, no tail
///     packed   |u0|u1|u2|u3|u4|u5|
///     packed   |u0|u1|u2|u3|u4|u5|t|          contiguous: sizes {6}, a tail of what is left over
///     tiles    |  tile 0   |tile 1 |          each is moved by one block of threads
struct ElementLayout {
  static constexpr int kMaxDims = 8;

  uint8_t* data;                    // address of unit 0
  int64_t num_units;                // 0 only if the tensor has no bytes
  int32_t unit_bytes;               // 1, 2, 4, 8 or 16; divides the address of every unit
  int32_t tail_bytes;               // bytes behind the last unit, fewer than a unit; 0 unless the tensor is contiguous
  int32_t num_dims;                 // no dim has size 1, and no two could be joined to one
  int64_t sizes[kMaxDims];          // in units, outermost first
  int64_t strides_bytes[kMaxDims];  // 0 where expanded; may be negative
};

/// \param view  Has a plain dtype. Its size in bytes fits in int64.
/// \returns nothing if more than kMaxDims dims are left after neighbours are joined. Pure.
std::optional<ElementLayout> layout_of(const tensor::StridedView& view);

/// Returns the size of the packed tensor, tail included.
BCP_HOST_DEVICE inline int64_t packed_bytes(const ElementLayout& layout) {
  return layout.num_units * layout.unit_bytes + layout.tail_bytes;
}

/// Whether the bytes in memory are in the packed order.
BCP_HOST_DEVICE inline bool is_contiguous(const ElementLayout& layout) {
  return layout.num_dims == 0 || (layout.num_dims == 1 && layout.strides_bytes[0] == layout.unit_bytes);
}

/// Returns the distance in bytes from `data` to a unit.
BCP_HOST_DEVICE inline int64_t offset_of(const ElementLayout& layout, int64_t unit) {
  if (layout.num_dims == 0) return 0;
  int64_t offset = 0;
  for (int d = layout.num_dims - 1; d > 0; --d) {
    const int64_t size = layout.sizes[d];
    // Devices have no instruction for division, and dividing 64 bits takes several times as long as 32 bits.
    const int64_t outer =
        ((unit | size) >> 32) == 0 ? static_cast<uint32_t>(unit) / static_cast<uint32_t>(size) : unit / size;
    offset += (unit - outer * size) * layout.strides_bytes[d];
    unit = outer;
  }
  return offset + unit * layout.strides_bytes[0];
}

/// A range of the units of one tensor: the work of one block of threads. The tile with the last unit also has the tail.
struct Tile {
  int64_t first_unit;
  uint32_t num_units;
  uint32_t piece;  // position of the tensor
};

/// Most bytes of a tile, without the tail. It is enough for each of 256 threads to move 16 bytes four times, and small
/// enough that one tensor of a few MiB occupies a whole device.
inline constexpr int64_t kTileBytes = 16 << 10;

BCP_HOST_DEVICE inline bool has_tail(const ElementLayout& layout, const Tile& tile) {
  return tile.first_unit + tile.num_units == layout.num_units;
}
BCP_HOST_DEVICE inline int64_t tile_bytes(const ElementLayout& layout, const Tile& tile) {
  return static_cast<int64_t>(tile.num_units) * layout.unit_bytes + (has_tail(layout, tile) ? layout.tail_bytes : 0);
}

namespace internal {

// What one load or store moves. They may alias every type, because tensors have every type.
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

/// Moves a tile in words of kBytes, which divide the unit and all addresses. Neighbouring threads move neighbouring
/// words of the packed side, so that a device needs few and wide accesses there.
template <int kBytes, bool kGather>
BCP_HOST_DEVICE inline void move_units(const ElementLayout& layout, const Tile& tile, uint8_t* packed, uint32_t thread,
                                       uint32_t num_threads) {
  using Word = typename WordOf<kBytes>::Type;
  int words_log2 = 0;  // log2 of the words in a unit
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
  uint8_t* tail_in_memory = layout.data + layout.num_units * layout.unit_bytes;  // only contiguous tensors have a tail
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

/// Copies the share of thread `thread` of a tile from the tensor to its packed form. The `num_threads` threads together
/// copy the whole tile. They need no order, because no two write the same byte.
///
/// \param packed  Where the first byte of the tile goes. It may have any alignment; it is fastest if unit_bytes divides
/// it.
BCP_HOST_DEVICE inline void gather_tile(const ElementLayout& layout, const Tile& tile, uint8_t* packed, uint32_t thread,
                                        uint32_t num_threads) {
  internal::move_tile<true>(layout, tile, packed, thread, num_threads);
}

/// The reverse. The tensor must not be expanded: of elements that share memory, any one would win.
BCP_HOST_DEVICE inline void scatter_tile(const ElementLayout& layout, const Tile& tile, const uint8_t* packed,
                                         uint32_t thread, uint32_t num_threads) {
  internal::move_tile<false>(layout, tile, const_cast<uint8_t*>(packed), thread, num_threads);  // read only
}

}  // namespace bytecheckpoint::staging
