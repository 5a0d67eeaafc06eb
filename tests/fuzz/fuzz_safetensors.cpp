// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/safetensors/safetensors.h"

#include "csrc/tensor/box.h"
#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"

namespace bytecheckpoint::fuzz {
namespace {

/// The most that an index takes: see `read_safetensors_index`.
constexpr int64_t kTimesOfAnIndex = 64;

std::string index_holds(std::string_view bytes) {
  PeakMemory memory(bytes.size(), kTimesOfAnIndex);
  const auto index = format::read_safetensors_index(bytes);
  BCP_ALL_HOLD(memory.stop());
  if (!index.is_ok()) {
    BCP_HOLDS(index.status().code() == base::Code::kCorrupt);
    return {};
  }
  for (const auto& [name, file] : index.value()) BCP_HOLDS(file.find('/') == std::string::npos && file != "..");
  return {};
}

}  // namespace

/// The tensors of a header tile what is behind it. The bytes are a file: the prefix, the header, and the elements.
std::string safetensors(std::string_view bytes) {
  BCP_ALL_HOLD(index_holds(bytes));
  PeakMemory memory(bytes.size());
  const auto size = static_cast<int64_t>(bytes.size());
  const auto length = format::safetensors_header_bytes(bytes.substr(0, format::kSafetensorsPrefixBytes), size);
  if (!length.is_ok()) return memory.stop();
  const auto header = format::read_safetensors_header(
      bytes.substr(format::kSafetensorsPrefixBytes, static_cast<size_t>(length.value())), size);
  BCP_ALL_HOLD(memory.stop());
  if (!header.is_ok()) {
    const base::Code code = header.status().code();
    BCP_HOLDS(code == base::Code::kCorrupt || code == base::Code::kUnsupported);
    return {};
  }
  int64_t at = format::kSafetensorsPrefixBytes + length.value();
  for (const format::SafetensorsTensor& each : header.value().tensors) {
    int64_t numel = 0;
    BCP_HOLDS(tensor::checked_numel(each.sizes, &numel));
    BCP_HOLDS(each.bytes == numel * tensor::find_plain_dtype(each.dtype)->itemsize_bytes);
    BCP_HOLDS(each.offset == at);
    at += each.bytes;
  }
  BCP_HOLDS(at == size);
  return {};
}

}  // namespace bytecheckpoint::fuzz
