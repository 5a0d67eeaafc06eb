// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/export/element_reader.h"

#include <utility>

namespace bytecheckpoint::engine {

using base::Status;

Status ElementReader::locate(const std::vector<TensorToRead>& tensors) {
  std::vector<std::string> fqns;
  for (const TensorToRead& tensor : tensors) {
    fqns.push_back(tensor.fqn);
    wanted_.push_back(tensor::find_plain_dtype(tensor.dtype));
    if (wanted_.back() != nullptr) continue;
    return Status::make(base::Code::kInvalidArgument,
                        base::text("'", tensor.fqn, "': the dtype that is wanted is not plain"));
  }
  return reader_.locate(fqns);
}

Status ElementReader::want(size_t tensor, int64_t first, int64_t last, uint8_t* to) {
  const tensor::DType wanted = wanted_[tensor]->dtype, stored = reader_.dtype(tensor);
  if (first == last) return Status::ok();
  const std::string& fqn = reader_.item(tensor).fqn;
  if (stored != wanted || (!computed_.empty() && computed_.count(fqn) != 0)) {
    const int64_t stored_itemsize = tensor::find_dtype(stored)->itemsize_bytes;
    std::vector<uint8_t> memory(static_cast<size_t>((last - first) * stored_itemsize));
    const ElementsToConvert elements{&fqn, first, last - first, stored, wanted, memory.data(), to};
    to = memory.data();
    to_convert_.push_back({std::move(memory), elements});
  }
  return reader_.want(tensor, first, last, to);
}

Status ElementReader::run(const std::function<bool()>& cancelled) {
  const base::Result<LoadStats> read = reader_.run(cancelled);
  const std::vector<ToConvert> to_convert = std::exchange(to_convert_, {});
  if (!read.is_ok()) return read.status();
  for (const ToConvert& each : to_convert) {
    BCP_RETURN_IF_ERROR(convert_(each.elements));
  }
  return Status::ok();
}

}  // namespace bytecheckpoint::engine
