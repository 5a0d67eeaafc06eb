// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/dcp/dcp_pickle.h"

#include <utility>

#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;
using Kind = PickleValue::Kind;

constexpr size_t kMaxAttributes = 64;

/// Appends a part of a path as pathlib does: an absolute part replaces everything before it.
void join(std::string_view part, bool windows, std::string* path) {
  const char separator = windows ? '\\' : '/';
  const bool absolute = !part.empty() && (part[0] == separator || (windows && part.size() > 1 && part[1] == ':'));
  if (absolute) path->clear();
  if (!path->empty() && path->back() != separator && !part.empty()) *path += separator;
  path->append(part);
}

}  // namespace

PickleValue Attributes::find(std::string_view name) const {
  PickleValue found;
  for (auto at = dict_.begin(); at != dict_.end(); ++at) {
    const bool is_found = (*at).is(Kind::kString) && pickle_->text(*at) == name;
    ++at;
    if (is_found) found = *at;  // of equal names the last counts
  }
  return found;
}

base::Result<DcpPickle> DcpPickle::read(std::string_view bytes) {
  BCP_ASSIGN_OR_RETURN(Pickle pickle, read_pickle(bytes, {find_dcp_global, false}));
  if (pickle.end() != bytes.size()) {
    return Status::make(Code::kCorrupt,
                        text("pickle: ends at byte ", pickle.end(), ", but the file has ", bytes.size(), " bytes"));
  }
  return DcpPickle(std::move(pickle));
}

base::Result<Attributes> DcpPickle::instance(const PickleValue& value, DcpGlobal global, std::string_view name) const {
  const std::optional<PickleObject> object = pickle_.object(value, Kind::kObject, global);
  if (!object.has_value()) return Status::make(Code::kCorrupt, text("not a ", name));
  Attributes attributes;
  // An instance without attributes has no state, or its state is None.
  if (object->state.is(Kind::kHole) || object->state.is(Kind::kNone)) return attributes;
  attributes.pickle_ = &pickle_;
  attributes.dict_ = pickle_.children(object->state);
  if (!object->state.is(Kind::kDict) || attributes.dict_.size() > 2 * kMaxAttributes) {
    return Status::make(Code::kCorrupt,
                        text(name, ": its state is not a dict of at most ", kMaxAttributes, " attributes"));
  }
  return attributes;
}

Status DcpPickle::read_dims(const PickleValue& value, std::string_view what, tensor::Dims* dims) {
  PickleValue sequence = value;
  const std::optional<PickleObject> size = pickle_.object(value, Kind::kCall, kTorchSize);
  if (size.has_value()) {
    const PickleSpan args = pickle_.children(size->args);
    if (args.size() == 1) sequence = args[0];
  }
  if (!sequence.is(Kind::kTuple) && !sequence.is(Kind::kList)) {
    return Status::make(Code::kCorrupt, text(what, ": not a torch.Size"));
  }
  const PickleSpan numbers = pickle_.children(sequence);
  if (numbers.size() > kMaxDims) {
    return Status::make(Code::kCorrupt,
                        text(what, ": has ", numbers.size(), " dims, but at most ", kMaxDims, " are possible"));
  }
  BCP_RETURN_IF_ERROR(budget_.take(numbers.size() * sizeof(int64_t)));
  dims->clear();
  dims->reserve(numbers.size());
  for (const PickleValue& number : numbers) {
    if (!number.is(Kind::kInt)) return Status::make(Code::kCorrupt, text(what, ": a dim is not an int"));
    dims->push_back(pickle_.integer(number));
  }
  return Status::ok();
}

base::Result<bool> DcpPickle::try_read_path(const PickleValue& value, std::string* path) {
  std::optional<PickleObject> call = pickle_.object(value, Kind::kCall, kPosixPath);
  const bool windows = !call.has_value();
  if (windows) call = pickle_.object(value, Kind::kCall, kWindowsPath);
  if (!call.has_value()) return false;
  path->clear();
  for (const PickleValue& part : pickle_.children(call->args)) {
    if (!part.is(Kind::kString)) return Status::make(Code::kCorrupt, "a part of a path is not a str");
    BCP_RETURN_IF_ERROR(budget_.take(kTimesToGrow * (pickle_.text(part).size() + 1)));
    join(pickle_.text(part), windows, path);
  }
  if (path->empty()) path->push_back('.');
  return true;
}

}  // namespace bytecheckpoint::format
