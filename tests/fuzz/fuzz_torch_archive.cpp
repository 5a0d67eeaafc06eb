// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/torch_archive.h"

#include "tests/fuzz/in_memory.h"
#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"

namespace bytecheckpoint::fuzz {

/// Every element of a tensor that is found lies in its storage, and the storage lies in the archive.
std::string torch_archive(std::string_view bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  PeakMemory memory(bytes.size());
  const auto read = format::read_tensor_archive(size, in_memory(bytes));
  BCP_ALL_HOLD(memory.stop());
  if (!read.is_ok()) {
    const base::Code code = read.status().code();
    BCP_HOLDS(code == base::Code::kCorrupt || code == base::Code::kUnsupported);
    return {};
  }
  if (!read.value().has_value()) return {};
  const format::ArchivedTensor& found = *read.value();
  BCP_HOLDS(found.storage_offset >= 0 && found.storage_bytes >= 0 &&
            found.storage_bytes <= size - found.storage_offset);
  const tensor::DTypeInfo* dtype = tensor::find_dtype(found.dtype);
  int64_t numel = 0;
  BCP_HOLDS(dtype != nullptr && tensor::checked_numel(found.sizes, &numel));
  BCP_HOLDS(found.sizes.size() == found.strides.size());
  if (numel == 0) return {};
  int64_t last = found.data_offset;
  for (size_t d = 0; d < found.sizes.size(); ++d) {
    BCP_HOLDS(found.strides[d] >= 0);
    last += (found.sizes[d] - 1) * found.strides[d] * dtype->itemsize_bytes;
  }
  BCP_HOLDS(found.data_offset >= found.storage_offset);
  BCP_HOLDS(last + dtype->itemsize_bytes <= found.storage_offset + found.storage_bytes);
  return {};
}

}  // namespace bytecheckpoint::fuzz
