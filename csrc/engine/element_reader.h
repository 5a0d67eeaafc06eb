// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/checkpoint_view.h"
#include "csrc/engine/coverage.h"
#include "csrc/engine/load_job.h"
#include "csrc/engine/tensor_place.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::engine {

/// Converts `count` elements of one dtype to another. \returns kUnsupported for dtypes that it does not know.
using ConvertElements = std::function<base::Status(tensor::DType from, const uint8_t* elements, tensor::DType to,
                                                   uint8_t* converted, int64_t count)>;

/// A tensor to read, all of it.
struct TensorToRead {
  std::string fqn;
  tensor::DType dtype = tensor::DType::kNone;  // in which its elements are wanted
};

/// Reads ranges of tensors as row-major elements, wherever and in how many chunks they are stored:
///
///     locate -> want, want, ... -> run -> want, ...
///
/// Each range is a few boxes of the tensor, and each box is read from the chunks that have it, straight to where it is
/// wanted; only elements of another dtype go through a buffer. Not thread-safe.
class ElementReader {
 public:
  /// \param checkpoint  Of `options.directory`.
  /// \param view        If `checkpoint` is that of a view; else null.
  /// \param convert     Needed where a dtype differs from the stored one.
  ElementReader(LoadOptions options, std::shared_ptr<const format::Manifest> checkpoint, const CheckpointView* view,
                ConvertElements convert)
      : checkpoint_(std::move(checkpoint)),
        view_(view),
        convert_(std::move(convert)),
        job_(std::move(options), checkpoint_) {}

  /// Finds where the tensors are; called once. \returns kInvalidArgument for a tensor that is not there, or lacks
  /// elements. kUnsupported for a tensor that is not plain. kCorrupt, kChanged and kStorage.
  base::Status locate(const std::vector<TensorToRead>& tensors);

  size_t num_tensors() const { return sources_.size(); }
  const format::Item& item(size_t tensor) const { return *sources_[tensor].item; }
  int64_t numel(size_t tensor) const { return sources_[tensor].numel; }
  int64_t itemsize_bytes(size_t tensor) const { return sources_[tensor].itemsize; }

  /// Makes the next run write elements [first, last) of a tensor to `to`, which must live until it has ended.
  base::Status want(size_t tensor, int64_t first, int64_t last, uint8_t* to);
  /// Reads all that is wanted. \param cancelled  See `LoadJob::run`.
  base::Status run(const std::function<bool()>& cancelled);

  /// Reads the bytes of a record, whatever they are.
  base::Result<std::string> read_record(const format::Record& record, const std::function<bool()>& cancelled);

 private:
  struct Source {
    const format::Item* item = nullptr;
    std::vector<TensorPlace> places;  // of each chunk
    int64_t numel = 0;
    tensor::DType dtype = tensor::DType::kNone;  // as wanted
    int64_t itemsize = 0;                        // as wanted

    tensor::DType stored_dtype() const { return places.empty() ? dtype : places.front().dtype; }
  };

  /// Elements that are read in their own dtype, and then converted.
  struct ToConvert {
    tensor::DType from, to;
    std::vector<uint8_t> elements;
    uint8_t* converted;
    int64_t count;
  };

  base::Result<Source> source_of(const TensorToRead& tensor, CoverageCheck* coverage) const;
  base::Status want_stored(const Source& source, int64_t first, int64_t last, uint8_t* to);

  const std::shared_ptr<const format::Manifest> checkpoint_;
  const CheckpointView* const view_;
  const ConvertElements convert_;
  LoadJob job_;
  std::vector<Source> sources_;
  std::vector<ToConvert> to_convert_;  // by the next run
};

}  // namespace bytecheckpoint::engine
