// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/tensor/dims.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::format {

/// How zarr, version 2 or 3, stores an array: cut into boxes of one size, each in a file, row-major and little-endian.
/// The boxes at the end of a dim may stick out of the array.
///
///     array [8, 6], chunk_sizes [4, 3]        files
///     0,0  0,1                                0.0  0.1  1.0  1.1              of version 2
///     1,0  1,1                                c/0/0  c/0/1  c/1/0  c/1/1      of version 3
///
/// A file with an index (`sharding_indexed`) is cut again, into boxes of `inner_sizes`.
struct ZarrArray {
  tensor::DType dtype = tensor::DType::kNone;  // a plain one
  tensor::Dims sizes;
  tensor::Dims chunk_sizes;  // of files
  tensor::Dims inner_sizes;  // of what lies in one piece in a file
  bool is_packed = false;    // each piece, by zstd
  bool has_index = false;
  bool is_index_first = false;  // else it is at the end of the file
  bool has_index_crc = false;
  bool has_c = false;  // names of files begin with "c"
  char separator = '.';

  /// Returns the name of the file that has chunk `position`, such as `c/0/1`.
  std::string name_of_chunk(const tensor::Dims& position) const;
  /// Returns how many chunks there are in each dim, or pieces in a chunk.
  tensor::Dims num_chunks() const;
  tensor::Dims num_pieces() const;
  int64_t piece_bytes() const;
  /// Returns the length of an index, in bytes.
  int64_t index_bytes() const;
};

/// Reads what describes an array: the file `.zarray` of version 2, or `zarr.json` of version 3.
/// \returns kCorrupt for damage; kUnsupported for what is not read here, by its name: other compressors than zstd,
/// other codecs, dtypes that torch does not have, column-major order.
base::Result<ZarrArray> read_zarr2(std::string_view json);
base::Result<ZarrArray> read_zarr3(std::string_view json);

/// A piece of a file. `bytes` is -1 if the file does not have it.
struct ZarrPiece {
  int64_t offset = 0;
  int64_t bytes = -1;
};

/// Reads the index of a file, `index_bytes()` long: where its pieces are, in row-major order.
/// \param file_bytes  Length of the file. \returns kCorrupt for a wrong checksum, and for a piece outside the file.
base::Result<std::vector<ZarrPiece>> read_zarr_index(const ZarrArray& array, std::string_view index,
                                                     int64_t file_bytes);

}  // namespace bytecheckpoint::format
