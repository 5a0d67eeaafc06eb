// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/standard_pickle.h"

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "csrc/base/crc32.h"
#include "csrc/base/utf8.h"
#include "csrc/format/torch/pickle_entry.h"
#include "csrc/format/tree.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;
using Kind = PickleValue::Kind;
using Global = StandardGlobal;

/// Limit for the steps of hashing: so many for each byte of the pickle, and so many for a small pickle.
constexpr size_t kMaxHashSteps = 32, kFreeHashSteps = 64 << 10;

/// The fewest bytes that torch.save writes of a tensor, and of a dim (its size and its stride).
constexpr size_t kLeastTensorBytes = 32, kLeastDimBytes = 4;

/// The signatures with which the picklers write a global. One letter is one argument, `|` separates signatures, and `*`
/// repeats the letter before it.
///
///     i int, f float, p bool, s str
///     b bytes (also as calls that make them), B bytes or bytearray
///     N None, n None or an empty dict
///     t tuple of ints, e empty tuple or list, l list of hashed values, m dict
///     d timedelta, z timezone, D dtype of numpy, g numpy.ndarray itself
///     c factory of a defaultdict, o anything
struct Shape {
  Global global;
  const char* args;
  const char* state = "";    // letters of a tuple; "m" is a dict, "" no state
  Kind items = Kind::kHole;  // kList, kDict: APPENDS, SETITEMS may fill it
  bool is_instance = false;  // made by NEWOBJ, not by a call
};

constexpr Shape kShapes[] = {
    {Global::kEncode, "ss"},
    {Global::kBytes, ""},
    {Global::kByteArray, "|b|ss"},
    {Global::kSet, "l"},
    {Global::kFrozenSet, "l"},
    {Global::kComplex, "ff"},
    {Global::kRange, "iii"},
    {Global::kSlice, "ooo"},
    {Global::kBytesIO, "", "bin", Kind::kHole, true},
    {Global::kDate, "b"},
    {Global::kTime, "b|bz"},
    {Global::kDateTime, "b|bz"},
    {Global::kTimeDelta, "iii"},
    {Global::kTimeZone, "d|ds"},
    {Global::kDecimal, "s"},
    {Global::kFraction, "ii"},
    {Global::kUuid, "", "m", Kind::kHole, true},
    {Global::kPurePosixPath, "s*"},
    {Global::kPosixPath, "s*"},
    {Global::kPureWindowsPath, "s*"},
    {Global::kWindowsPath, "s*"},
    {Global::kOrderedDict, "", "", Kind::kDict},
    {Global::kDefaultDict, "|c", "", Kind::kDict},
    {Global::kDeque, "|ei", "", Kind::kList},
    {Global::kCounter, "|m"},
    {Global::kSimpleNamespace, "", "m"},
    {Global::kNumpyDType, "spp", "isNNNiii"},
    {Global::kNumpyReconstruct, "gtb", "itDpb"},
    {Global::kNumpyFromBuffer, "BDts"},
    {Global::kNumpyScalar, "Db"},
    {Global::kTorchSize, "t"},
    {Global::kTorchDevice, "s|si"},
};

const Shape* shape_of(uint32_t global) {
  for (const Shape& shape : kShapes) {
    if (static_cast<uint32_t>(shape.global) == global) return &shape;
  }
  return nullptr;
}

/// Returns whether a class may make the missing values of a defaultdict.
bool is_factory(Global global) {
  switch (global) {
    case Global::kBytes:
    case Global::kByteArray:
    case Global::kSet:
    case Global::kFrozenSet:
    case Global::kComplex:
    case Global::kOrderedDict:
    case Global::kDefaultDict:
    case Global::kDeque:
    case Global::kCounter:
      return true;
    default:
      return global >= Global::kInt && global <= Global::kObject;
  }
}

bool is_plain_typestr(std::string_view typestr) {
  constexpr std::string_view kKinds = "biufcSU";
  return typestr.size() >= 2 && typestr.size() <= 10 && kKinds.find(typestr[0]) != kKinds.npos &&
         typestr.find_first_not_of("0123456789", 1) == typestr.npos;
}

/// Walks over all values of a pickle, each one once.
class StandardCheck {
 public:
  StandardCheck(const Pickle& pickle, std::unordered_map<uint32_t, PickledTensor>* tensors)
      : pickle_(pickle),
        tensors_(tensors),
        visited_(pickle.arena().size()),
        taken_(pickle.arena().size()),
        steps_left_(kMaxHashSteps * pickle.num_bytes() + kFreeHashSteps) {}

  Status run() {
    BCP_RETURN_IF_ERROR(check(pickle_.root(), 0));
    const bool has_tensors = tensors_ != nullptr && !tensors_->empty();
    return has_tensors && !has_standard_ ? refuse("tensors and builtin values alone") : Status::ok();
  }

 private:
  static Status refuse(std::string why) { return Status::make(Code::kUnsupported, std::move(why)); }

  Status check(const PickleValue& value, int depth) {
    if (depth > kMaxTreeDepth) return refuse(text("nested more than ", kMaxTreeDepth, " deep"));
    switch (value.kind) {
      case Kind::kHole:
      case Kind::kPersistent:
        return refuse("neither builtin nor of a standard type");
      case Kind::kGlobal:
        return is_dtype(value) ? Status::ok() : refuse("a class or function");
      case Kind::kTuple:
      case Kind::kList:
      case Kind::kDict:
        return check_container(value, depth);
      case Kind::kSet:
      case Kind::kFrozenSet:
        has_standard_ = true;
        return check_container(value, depth);
      case Kind::kByteArray:
      case Kind::kLong:
        has_standard_ = true;
        return Status::ok();
      case Kind::kObject:
      case Kind::kCall:
        return check_object(value, depth);
      default:
        return Status::ok();
    }
  }

  /// Marks a value that is not empty. \returns false if it was marked before.
  bool visit(const PickleValue& value) {
    if (value.at == 0) return true;
    const bool is_first = !visited_[value.at];
    visited_[value.at] = true;
    return is_first;
  }

  Status check_container(const PickleValue& value, int depth) {
    if (taken_[value.at]) return refuse("a list or dict that is an argument stands in another place, too");
    return visit(value) ? check_children(value, value.is(Kind::kSet) || value.is(Kind::kFrozenSet), depth)
                        : Status::ok();
  }

  /// \param are_hashed  Whether all children are hashed (a set); otherwise only the keys of a dict are.
  Status check_children(const PickleValue& value, bool are_hashed, int depth) {
    bool is_key = value.is(Kind::kDict);
    for (const PickleValue& child : pickle_.children(value)) {
      if (are_hashed || is_key) BCP_RETURN_IF_ERROR(measure_hash(child, false, depth + 1));
      BCP_RETURN_IF_ERROR(check(child, depth + 1));
      is_key = value.is(Kind::kDict) && !is_key;
    }
    return Status::ok();
  }

  /// Counts the steps of hashing a key: Python hashes all that a key holds, as often as it stands there.
  Status measure_hash(const PickleValue& value, bool is_argument, int depth) {
    const size_t steps = 1 + (is_argument ? pickle_.text(value).size() : 0);
    if (steps > steps_left_ || depth > kMaxTreeDepth) return refuse("keys that are larger than their pickle");
    steps_left_ -= steps;
    for (const PickleValue& child : pickle_.children(value)) {
      BCP_RETURN_IF_ERROR(measure_hash(child, is_argument, depth + 1));
    }
    if (!value.is(Kind::kObject) && !value.is(Kind::kCall)) return Status::ok();
    return measure_hash(pickle_.object(value)->args, true, depth + 1);
  }

  Status check_object(const PickleValue& value, int depth) {
    if (!visit(value)) return Status::ok();
    if (std::optional<PickledTensor> tensor = read_pickled_tensor(pickle_, value); tensor.has_value()) {
      return add_tensor(value, std::move(*tensor));
    }
    const PickleObject object = *pickle_.object(value);
    const Shape* shape = shape_of(object.global);
    if (shape == nullptr || shape->is_instance != value.is(Kind::kObject)) return refuse("no value of a standard type");
    if (!matches(*shape, object)) return refuse("not what the pickler of its type writes");
    has_standard_ = true;
    for (const PickleValue& part : {object.args, object.state, object.items}) {
      if (part.is(Kind::kHole)) continue;
      BCP_RETURN_IF_ERROR(check_parts(*shape, part, depth));
    }
    return Status::ok();
  }

  Status add_tensor(const PickleValue& value, PickledTensor tensor) {
    if (tensors_ == nullptr) return refuse("a tensor");
    if (tensor.is_conj || tensor.is_neg) return refuse("conjugates or negatives of what is stored");
    tensor_bytes_ += kLeastTensorBytes + tensor.sizes.size() * kLeastDimBytes;
    if (tensor_bytes_ > pickle_.num_bytes()) return refuse("tensors that share what they are made of");
    tensors_->emplace(value.at, std::move(tensor));
    return Status::ok();
  }

  /// Checks the arguments, state or items of an object whose signatures match.
  Status check_parts(const Shape& shape, const PickleValue& parts, int depth) {
    if (parts.is(Kind::kList) || parts.is(Kind::kDict)) return check_taken(parts, false, depth);
    for (const PickleValue& part : pickle_.children(parts)) {
      if (part.is(Kind::kList) || part.is(Kind::kDict)) {
        BCP_RETURN_IF_ERROR(check_taken_or_kept(shape, part, depth));
      } else if (!part.is(Kind::kGlobal)) {
        BCP_RETURN_IF_ERROR(check(part, depth + 1));
      }
    }
    return Status::ok();
  }

  Status check_taken_or_kept(const Shape& shape, const PickleValue& part, int depth) {
    if (shape.global == Global::kSlice) return check(part, depth + 1);
    return check_taken(part, shape.global != Global::kCounter, depth);
  }

  /// Checks a list or dict whose values go into an object. It may stand in no other place, because the values that are
  /// made of the pickle do not contain it.
  Status check_taken(const PickleValue& value, bool are_hashed, int depth) {
    if (!visit(value)) return refuse("a list or dict that is an argument stands in another place, too");
    if (value.at != 0) taken_[value.at] = true;
    return check_children(value, are_hashed, depth);
  }

  bool matches(const Shape& shape, const PickleObject& object) const {
    const bool is_filled = !object.items.is(Kind::kHole);
    if (is_filled && !object.items.is(shape.items)) return false;
    if (!matches_any(shape.args, object.args) || !matches_state(shape, object.state)) return false;
    switch (shape.global) {
      case Global::kEncode:
        return is_latin1(object.args);
      case Global::kByteArray: {
        const PickleSpan args = pickle_.children(object.args);
        return args.size() < 2 || is_latin1(object.args);
      }
      case Global::kNumpyDType:
        return is_plain_typestr(pickle_.text(pickle_.children(object.args)[0]));
      default:
        return true;
    }
  }

  bool matches_state(const Shape& shape, const PickleValue& state) const {
    const std::string_view wanted = shape.state;
    if (wanted.empty()) return state.is(Kind::kHole);
    if (wanted != "m") return state.is(Kind::kTuple) && matches_one(wanted, state);
    // A namespace without attributes has no state; a UUID always has one.
    if (state.is(Kind::kHole)) return shape.global == Global::kSimpleNamespace;
    return state.is(Kind::kDict) && are_attributes(shape, state);
  }

  bool are_attributes(const Shape& shape, const PickleValue& state) const {
    bool is_name = true, has_int = false;
    for (const PickleValue& value : pickle_.children(state)) {
      if (is_name && !value.is(Kind::kString)) return false;
      if (shape.global == Global::kUuid) {
        const std::string_view name = pickle_.text(value);
        if (is_name && name != "int" && name != "is_safe") return false;
        if (!is_name && !is_int(value)) return false;
        has_int |= is_name && name == "int";
      }
      is_name = !is_name;
    }
    return has_int || shape.global != Global::kUuid;
  }

  bool matches_any(std::string_view signatures, const PickleValue& args) const {
    for (size_t begin = 0;;) {
      const size_t end = std::min(signatures.find('|', begin), signatures.size());
      if (matches_one(signatures.substr(begin, end - begin), args)) return true;
      if (end == signatures.size()) return false;
      begin = end + 1;
    }
  }

  bool matches_one(std::string_view signature, const PickleValue& tuple) const {
    const PickleSpan values = pickle_.children(tuple);
    const bool repeats = !signature.empty() && signature.back() == '*';
    if (!repeats && values.size() != signature.size()) return false;
    size_t i = 0;
    for (const PickleValue& value : values) {
      if (!matches_letter(repeats ? signature[0] : signature[i++], value)) return false;
    }
    return true;
  }

  bool matches_letter(char letter, const PickleValue& value) const {
    switch (letter) {
      case 'i':
        return is_int(value);
      case 'f':
        return value.is(Kind::kFloat);
      case 'p':
        return value.is(Kind::kBool);
      case 'N':
        return value.is(Kind::kNone);
      case 'n':
        return value.is(Kind::kNone) || (value.is(Kind::kDict) && pickle_.children(value).size() == 0);
      case 's':
        return value.is(Kind::kString);
      case 'b':
        return is_bytes(value);
      case 'B':
        return is_bytes(value) || value.is(Kind::kByteArray) || is_call(value, Global::kByteArray);
      case 't':
        return value.is(Kind::kTuple) && matches_one("i*", value);
      case 'e':
        return (value.is(Kind::kTuple) || value.is(Kind::kList)) && pickle_.children(value).size() == 0;
      case 'l':
        return value.is(Kind::kList);
      case 'm':
        return value.is(Kind::kDict);
      case 'd':
        return is_call(value, Global::kTimeDelta);
      case 'z':
        return is_call(value, Global::kTimeZone);
      case 'D':
        return is_call(value, Global::kNumpyDType);
      case 'g':
        return value.is(Kind::kGlobal) && static_cast<Global>(value.global()) == Global::kNumpyArray;
      case 'c':
        return value.is(Kind::kNone) || (value.is(Kind::kGlobal) && is_factory(static_cast<Global>(value.global())));
      default:  // o
        return !value.is(Kind::kGlobal) || is_dtype(value);
    }
  }

  static bool is_dtype(const PickleValue& global) {
    return global.global() >= static_cast<uint32_t>(Global::kTorchDType) &&
           global.global() < static_cast<uint32_t>(Global::kTorchStorage);
  }

  static bool is_int(const PickleValue& value) { return value.is(Kind::kInt) || value.is(Kind::kLong); }

  bool is_call(const PickleValue& value, Global global) const {
    return pickle_.object(value, Kind::kCall, static_cast<uint32_t>(global)).has_value();
  }

  bool is_bytes(const PickleValue& value) const {
    return value.is(Kind::kBytes) || is_call(value, Global::kBytes) || is_call(value, Global::kEncode);
  }

  /// Returns whether the arguments are (text, 'latin1') and the text has only characters up to U+00FF.
  bool is_latin1(const PickleValue& args) const {
    const PickleSpan values = pickle_.children(args);
    const std::string_view encoding = pickle_.text(values[1]);
    if (encoding != "latin1" && encoding != "latin-1") return false;
    // In UTF-8 such characters begin with 0xC2 or 0xC3, or are ASCII.
    const std::string_view chars = pickle_.text(values[0]);
    return std::all_of(chars.begin(), chars.end(), [](char c) { return static_cast<uint8_t>(c) < 0xC4; });
  }

  const Pickle& pickle_;
  std::unordered_map<uint32_t, PickledTensor>* const tensors_;
  std::vector<bool> visited_;  // containers and objects that were visited, by their cell
  std::vector<bool> taken_;    // lists and dicts that are arguments of objects
  size_t steps_left_;          // left for hashing
  size_t tensor_bytes_ = 0;    // the fewest that the tensors take in the pickle
  bool has_standard_ = false;  // there is a value that torch's own rules may refuse
};

/// Returns kCorrupt if the bytes of a storage fail their CRC.
Status check_storage(std::string_view archive, const ArchivedTensor& tensor) {
  const std::string_view storage =
      archive.substr(static_cast<size_t>(tensor.storage_offset), static_cast<size_t>(tensor.storage_bytes));
  if (!tensor.storage_crc.has_value() || base::crc32(0, storage.data(), storage.size()) == *tensor.storage_crc) {
    return Status::ok();
  }
  return corrupt_archive(text("storage at byte ", tensor.storage_offset, " fails its CRC"));
}

}  // namespace

PickleRules standard_rules() {
  return {find_standard_global, true, true};
}

Status check_standard(const Pickle& pickle, std::unordered_map<uint32_t, PickledTensor>* tensors) {
  return StandardCheck(pickle, tensors).run();
}

base::Result<std::optional<StandardArchive>> read_standard_archive(std::string_view archive) {
  std::optional<StandardArchive> other;
  ArchiveReader reader(archive);
  BCP_ASSIGN_OR_RETURN(const std::optional<PickleEntry> entry, read_value_entry(&reader, archive.size()));
  if (!entry.has_value()) return other;
  base::Result<Pickle> pickle = read_pickle(entry->pickle, standard_rules());
  if (!pickle.is_ok() || pickle.value().end() != entry->pickle.size()) return other;
  std::unordered_map<uint32_t, PickledTensor> tensors;
  if (!check_standard(pickle.value(), &tensors).is_ok()) return other;
  StandardArchive out{std::move(pickle.value()), {}};
  std::unordered_set<int64_t> checked;  // offsets of storages, of which each may hold several tensors
  for (auto& [cell, pickled] : tensors) {
    BCP_ASSIGN_OR_RETURN(std::optional<ArchivedTensor> archived, locate_tensor(pickled, *entry, &reader));
    if (!archived.has_value()) return other;
    if (checked.insert(archived->storage_offset).second) BCP_RETURN_IF_ERROR(check_storage(archive, *archived));
    out.tensors.emplace(cell, StandardTensor{std::move(pickled), std::move(*archived)});
  }
  return std::make_optional(std::move(out));
}

}  // namespace bytecheckpoint::format
