// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/tensor/dims.h"
#include "csrc/tensor/dtype.h"

// Hugging Face's format for tensors: https://github.com/huggingface/safetensors. A file is
//
//     | length of the header, u64 | header: JSON, padded with spaces | elements of all tensors, without a gap |
//     0                           8                                  8 + length                    end of file

namespace bytecheckpoint::format {

inline constexpr int64_t kSafetensorsPrefixBytes = 8;
/// Headers above this are refused, as Hugging Face's own reader does: they are a third of a million tensors and more.
inline constexpr int64_t kMostSafetensorsHeaderBytes = 100'000'000;

/// One tensor of a file. Its elements are row-major.
struct SafetensorsTensor {
  std::string name;
  tensor::DType dtype = tensor::DType::kNone;
  tensor::Dims sizes;  // in elements of torch: two values of 4 bits are one
  int64_t offset = 0;  // of the first element, from the start of the file
  int64_t bytes = 0;
};

/// What the header of a file says.
struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  // in the order of their elements in the file
  std::string metadata;                    // `__metadata__`, a JSON object of strings; empty if there is none
};

/// Returns the length of the header.
/// \param prefix      The first 8 bytes of the file, or all of it if it is shorter.
/// \param file_bytes  Length of the file.
/// \returns kCorrupt for a file that is too short for what it says; kUnsupported for a header above the limit.
base::Result<int64_t> safetensors_header_bytes(std::string_view prefix, int64_t file_bytes);

/// Reads a header, which may be damaged or hostile. Afterwards every tensor lies in the file, all of them tile it from
/// the header to the end, names are unique, and sizes and bytes fit.
///
/// \param header      The bytes behind the prefix.
/// \param file_bytes  Length of the file.
/// \returns kCorrupt for damage. kUnsupported for a dtype that torch lacks, or that has elements of less than a byte.
/// Takes at most 16 times the size of the header and 64 KiB of memory. O(n log n).
base::Result<SafetensorsHeader> read_safetensors_header(std::string_view header, int64_t file_bytes);

/// Reads the index of a model in several files, `model.safetensors.index.json`.
///
/// \returns the name of each tensor with its file, sorted by tensor; file names are those of files right beside the
/// index. kCorrupt for damage, another file name, and a tensor that is there twice. Takes at most 64 times the size of
/// the index and 64 KiB of memory.
base::Result<std::vector<std::pair<std::string, std::string>>> read_safetensors_index(std::string_view index);

/// Returns the name that the format has for a dtype, such as `F32`; nullptr if it has none.
const char* safetensors_name(tensor::DType dtype);

}  // namespace bytecheckpoint::format
