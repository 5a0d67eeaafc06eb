// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "csrc/base/status.h"
#include "csrc/format/dcp_globals.h"
#include "csrc/format/pickle_reader.h"
#include "csrc/format/pickle_tree.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::format {

/// What a buffer takes at most that grows to a size it does not know: twice that, and what it grew out of.
inline constexpr size_t kTimesToGrow = 3;

/// Attributes of a pickled instance, found by name. There are few, so that finding is cheap however often an instance
/// is shared.
class Attributes {
 public:
  /// A hole if there is none of this name.
  PickleValue find(std::string_view name) const;
  PickleSpan dict() const { return dict_; }

 private:
  friend class DcpPickle;
  const Pickle* pickle_ = nullptr;
  PickleSpan dict_;  // names and values in turn
};

/// A pickle read with the globals of DCP's metadata, and how its objects are understood. Methods take from one budget
/// whatever they copy. The messages of their failures are for the caller to complete: they do not say of which key.
class DcpPickle {
 public:
  static base::Result<DcpPickle> read(std::string_view bytes);

  const Pickle& values() const { return pickle_; }
  UnfoldBudget* budget() { return &budget_; }

  /// Attributes of an instance of `global`; kCorrupt if `value` is none. \param name  Of the class, for the message.
  base::Result<Attributes> instance(const PickleValue& value, DcpGlobal global, std::string_view name) const;
  /// torch.Size, or a plain tuple or list of ints. kCorrupt for others and for more than kMaxDims.
  base::Status read_dims(const PickleValue& value, std::string_view what, tensor::Dims* dims);
  /// A path of pathlib as its string; false if `value` is none.
  base::Result<bool> try_read_path(const PickleValue& value, std::string* path);

 private:
  explicit DcpPickle(Pickle pickle) : pickle_(std::move(pickle)), budget_(pickle_) {}

  Pickle pickle_;
  UnfoldBudget budget_;
};

}  // namespace bytecheckpoint::format
