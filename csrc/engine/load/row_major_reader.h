// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/load/checkpoint_view.h"
#include "csrc/engine/load/load_job.h"
#include "csrc/engine/load/tensor_place.h"

namespace bytecheckpoint::engine {

/// Reads ranges of the elements of tensors, in row-major order, from whatever chunks have them. So a tensor of any size
/// can be gone through from front to back in little memory:
///
///     locate(names) -> want(tensor, first, last, memory), ... -> run -> want, ... -> run
///
/// A range is a few boxes, and each box is read straight from the chunks into the memory. Not thread-safe.
class RowMajorReader {
 public:
  /// \param checkpoint  Of `reading.directory`.
  /// \param view        If `checkpoint` is that of a view; else null. Must outlive the reader.
  RowMajorReader(LoadOptions reading, std::shared_ptr<const format::Manifest> checkpoint, const CheckpointView* view)
      : directory_(reading.directory),
        checkpoint_(std::move(checkpoint)),
        view_(view),
        job_(std::move(reading), checkpoint_) {}

  /// Follows the checksums that another writer stored, through all runs; see `StoredChecksums`. Call it before `want`.
  /// \param checksums  Must outlive the reader.
  void follow(StoredChecksums* checksums) { job_.destinations().follow(checksums); }
  /// Finds where the tensors are. Call it once.
  /// \returns kInvalidArgument for a tensor that is not there or lacks elements. kUnsupported for one that is not
  /// stored as plain elements of one dtype. kCorrupt, kChanged and kStorage.
  base::Status locate(const std::vector<std::string>& fqns);

  size_t num_tensors() const { return tensors_.size(); }
  /// Number of elements of a tensor, given by its position among those that were located.
  int64_t numel(size_t tensor) const { return tensors_[tensor].numel; }
  const format::Item& item(size_t tensor) const { return *tensors_[tensor].item; }
  /// Dtype in which a tensor is stored; `kNone` for one that has no chunks and so no elements.
  tensor::DType dtype(size_t tensor) const { return tensors_[tensor].dtype; }

  /// Makes the next run read elements [first, last) of a tensor.
  /// \param to  Room for as many elements of the stored dtype; must live until the run ends.
  /// \returns kInvalidArgument for elements that the tensor does not have.
  base::Status want(size_t tensor, int64_t first, int64_t last, uint8_t* to);
  /// Returns the record of an object. \returns kInvalidArgument if there is none; kCorrupt if its file is too short.
  base::Result<const format::Record*> object(const std::string& fqn) const;
  /// Makes the next run read bytes [begin, end) of a record.
  void want_record(const format::Record& record, int64_t begin, int64_t end, uint8_t* to) {
    job_.destinations().add_bytes(record, begin, end, to);
  }
  /// Forgets what is wanted. `run` does, too, however it ends.
  void forget() { job_.destinations().clear(); }
  /// Reads all that is wanted. See `LoadJob::run`.
  base::Result<LoadStats> run(const std::function<bool()>& cancelled) { return job_.run(cancelled); }

 private:
  struct Tensor {
    const format::Item* item = nullptr;
    std::vector<TensorPlace> places;  // of each chunk
    int64_t numel = 0;
    tensor::DType dtype = tensor::DType::kNone;
    bool is_padded = false;  // what is in no chunk is zero
  };

  const std::string directory_;
  const std::shared_ptr<const format::Manifest> checkpoint_;
  const CheckpointView* const view_;
  LoadJob job_;
  std::vector<Tensor> tensors_;
};

}  // namespace bytecheckpoint::engine
