// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "csrc/base/status.h"
#include "csrc/format/pickle/dcp_globals.h"
#include "csrc/format/pickle/pickle_reader.h"
#include "csrc/format/pickle/pickle_tree.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::format {

/// The most memory that a growing buffer takes, as a multiple of its content: twice its content, and the buffer that it
/// grew out of.
inline constexpr size_t kTimesToGrow = 3;

/// The attributes of a pickled instance, found by name. An instance has at most 64, so that a search stays cheap even
/// if the pickle shares one instance among many places.
class Attributes {
 public:
  /// Returns the value of an attribute, or a hole if there is none. Of equal names the last counts, as in a dict.
  PickleValue find(std::string_view name) const;
  PickleSpan dict() const { return dict_; }

 private:
  friend class DcpPickle;
  const Pickle* pickle_ = nullptr;
  PickleSpan dict_;  // name, value, name, value, ...
};

/// A pickle that was read with the globals of DCP's metadata, and methods that interpret its objects.
///
/// All methods together take what they copy from one budget, so that a small pickle cannot make us use much memory. The
/// messages of their failures do not name the key; callers add it.
class DcpPickle {
 public:
  /// \param bytes  One pickle, up to its STOP; must outlive the object.
  /// \returns what `read_pickle` fails with; kCorrupt if bytes follow the STOP.
  static base::Result<DcpPickle> read(std::string_view bytes);

  const Pickle& values() const { return pickle_; }
  UnfoldBudget* budget() { return &budget_; }

  /// Returns the attributes of an instance of `global`.
  /// \param name  Name of the class, for the message.
  /// \returns kCorrupt if `value` is no such instance.
  base::Result<Attributes> instance(const PickleValue& value, DcpGlobal global, std::string_view name) const;
  /// Reads a torch.Size, or a plain tuple or list of ints.
  /// \param what  Name of the value, for the message.
  /// \returns kCorrupt for other values and for more than kMaxDims ints.
  base::Status read_dims(const PickleValue& value, std::string_view what, tensor::Dims* dims);
  /// Reads a path of pathlib as a string. \returns false if `value` is no such path; kCorrupt for a part that is no
  /// str.
  base::Result<bool> try_read_path(const PickleValue& value, std::string* path);

 private:
  explicit DcpPickle(Pickle pickle) : pickle_(std::move(pickle)), budget_(pickle_) {}

  Pickle pickle_;
  UnfoldBudget budget_;
};

}  // namespace bytecheckpoint::format
