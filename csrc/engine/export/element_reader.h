// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/load/checkpoint_view.h"
#include "csrc/engine/load/row_major_reader.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::engine {

/// Elements of a tensor on their way from a checkpoint to a file.
struct ElementsToConvert {
  const std::string* fqn;
  int64_t first;  // number of the first one, in row-major order
  int64_t count;
  tensor::DType from, to;
  const uint8_t* elements;
  uint8_t* converted;
};

/// Converts elements to another dtype, or computes others from them. \returns kUnsupported for dtypes that it does not
/// know.
using ConvertElements = std::function<base::Status(const ElementsToConvert&)>;

/// A tensor to read, all of it.
struct TensorToRead {
  std::string fqn;
  tensor::DType dtype = tensor::DType::kNone;  // in which its elements are wanted
};

/// Reads what a `RowMajorReader` reads, in the dtypes that are wanted. Only elements of another dtype, or
/// that are computed, go through a buffer. Not thread-safe.
class ElementReader {
 public:
  /// \param checkpoint  Of `options.directory`.
  /// \param view        If `checkpoint` is that of a view; else null.
  /// \param convert     Needed where a dtype differs from the stored one.
  /// \param computed    Names of tensors whose elements all go through `convert`.
  ElementReader(LoadOptions options, std::shared_ptr<const format::Manifest> checkpoint, const CheckpointView* view,
                ConvertElements convert, const std::unordered_set<std::string>& computed)
      : convert_(std::move(convert)),
        computed_(computed),
        reader_(in_short_runs(std::move(options)), std::move(checkpoint), view) {}

  /// See `RowMajorReader::follow`.
  void follow(StoredChecksums* checksums) { reader_.follow(checksums); }
  /// Finds where the tensors are; called once. \returns what `RowMajorReader::locate` returns; kInvalidArgument also
  /// for a dtype that is not plain.
  base::Status locate(const std::vector<TensorToRead>& tensors);

  const format::Item& item(size_t tensor) const { return reader_.item(tensor); }
  int64_t numel(size_t tensor) const { return reader_.numel(tensor); }
  int64_t itemsize_bytes(size_t tensor) const { return wanted_[tensor]->itemsize_bytes; }

  /// Makes the next run write elements [first, last) of a tensor to `to`, which must live until it has ended.
  base::Status want(size_t tensor, int64_t first, int64_t last, uint8_t* to);
  /// Makes the next run write bytes [begin, end) of a record to `to`.
  void want_record(const format::Record& record, int64_t begin, int64_t end, uint8_t* to) {
    reader_.want_record(record, begin, end, to);
  }
  /// Reads all that is wanted. \param cancelled  See `LoadJob::run`.
  base::Status run(const std::function<bool()>& cancelled);

 private:
  /// Elements that are read in their own dtype, and then converted.
  struct ToConvert {
    std::vector<uint8_t> memory;
    ElementsToConvert elements;
  };

  /// A run ends when its last segment is checked and copied, and meanwhile nothing is read: so segments are short.
  static LoadOptions in_short_runs(LoadOptions options) {
    options.segment_bytes = 2 << 20;
    return options;
  }

  const ConvertElements convert_;
  const std::unordered_set<std::string>& computed_;
  RowMajorReader reader_;
  std::vector<const tensor::DTypeInfo*> wanted_;  // of each tensor
  std::vector<ToConvert> to_convert_;             // by the next run
};

}  // namespace bytecheckpoint::engine
