// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/staging/value_tables.h"
#include "csrc/tensor/dims.h"

namespace bytecheckpoint::staging {

/// Where the codes of a quantized tensor are in a record, and which scale belongs to each. Codes are numbered in the
/// order in which the record has them.
struct CodeLayout {
  /// A dim of the quantized tensor.
  struct Dim {
    int64_t stride = 0;        // from a code to the next one, in codes
    int64_t size = 0;          // of the box of the tensor that the record has
    int64_t offset = 0;        // of the box
    int64_t block = 1;         // indices with one scale
    int64_t scale_offset = 0;  // index of the first scale that is there
    int64_t scale_stride = 0;  // from a scale to the next one, in scales
  };

  CodeKind kind;
  int64_t first = 0;      // number of the code at the first index of the box
  std::vector<Dim> dims;  // descending strides; each is at least as long as what the dims behind it span
};

/// Codes that are wanted, and the memory of their values. Dims are in the order of their strides in the record,
/// descending.
struct WantedCodes {
  int64_t first = 0;  // number of the first one
  tensor::Dims sizes;
  tensor::Dims strides;         // in codes
  tensor::Dims memory_strides;  // in bytes; may be negative
  uint8_t* memory = nullptr;
};

/// Dequantizes a box of a tensor: the counterpart of `scatter_window` for codes.
///
/// The codes of a window are found in the order of the record, a run of those that have one scale at a time. Where
/// neighbours in the record are far apart in memory, as in a transposed tensor, a tile of some lines is computed first
/// and then turned, so that memory is written in neighbouring elements.
/// Immutable, so thread-safe, but for the memory that it fills.
class Dequantizer {
 public:
  Dequantizer(CodeLayout layout, const WantedCodes& wanted);

  /// Fills the values whose codes are in a window.
  /// \param window  Bytes [begin, end) of the record.
  /// \param scales  The scales of all blocks that the wanted codes are in.
  /// \param tables  Of the calling thread.
  void scatter(const uint8_t* window, int64_t begin, int64_t end, const uint8_t* scales, ValueTables* tables) const;

 private:
  struct Dim {
    int64_t size, stride, memory_stride;
  };
  struct Window {
    const uint8_t* bytes;
    int64_t begin, end;  // numbers of codes
    const uint8_t* scales;
    ValueTables* tables;
  };

  /// Returns the number of the first code of a line, and where its value goes.
  int64_t line_begin(int64_t line, int64_t* memory_offset) const;
  int64_t first_line_ending_after(int64_t code) const;
  /// Fills those of elements [from, to) of a line that are in the window.
  void fill(const Window& window, int64_t line, int64_t from, int64_t to) const;
  /// Fills elements [from, to) of `count` lines, whose values are neighbours in memory. All are in the window.
  void fill_tile(const Window& window, int64_t line, int64_t count, int64_t from, int64_t to) const;
  /// Computes the values of codes that are as far apart as those of a line.
  void compute(const Window& window, int64_t code, int64_t count, uint8_t* to, int64_t memory_step) const;

  CodeLayout layout_;
  int64_t first_;
  uint8_t* memory_;
  int64_t itemsize_;
  std::vector<Dim> outer_;  // outermost first; the line itself is not in it
  Dim line_{1, 1, 0};
  int64_t num_lines_ = 1;
  int64_t base_scale_ = 0;  // number of the scale of dims that are not in `layout_.dims`
  int64_t codes_per_scale_ = 1;
  size_t step_dim_ = SIZE_MAX;  // dim of the layout along which a line goes; SIZE_MAX: along no single one
  int64_t step_ = 0;            // indices of that dim from one element of a line to the next
};

}  // namespace bytecheckpoint::staging
