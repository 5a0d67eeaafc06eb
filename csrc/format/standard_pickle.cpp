// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/standard_pickle.h"

#include <algorithm>
#include <string>
#include <vector>

#include "csrc/base/utf8.h"
#include "csrc/format/pickle_entry.h"
#include "csrc/format/tree.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;
using Kind = PickleValue::Kind;
using Global = StandardGlobal;

/// Steps of hashing for each byte of the pickle, and those that a small one has anyway.
constexpr size_t kMaxHashSteps = 32, kFreeHashSteps = 64 << 10;

/// What stands in a signature, a letter an argument; `|` separates signatures, `*` repeats the letter before it.
///
/// i int, f float, p bool, s str, b bytes (also as calls that make them), B bytes or bytearray, N None, n None or an
/// empty dict, t tuple of ints, e empty tuple or list, l list of hashed values, m dict, d timedelta, z timezone, D
/// dtype of numpy, g numpy.ndarray itself, c what makes the missing values of a defaultdict, o anything.
struct Shape {
  Global global;
  const char* args;
  const char* state = "";    // of a tuple; `m` is a dict; "" is none
  Kind items = Kind::kHole;  // kList or kDict: what APPENDS or SETITEMS may fill
  bool is_instance = false;  // by NEWOBJ, not by a call
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

/// Classes that may make the missing values of a defaultdict.
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

/// A walk over all that a pickle says, once each.
class StandardCheck {
 public:
  explicit StandardCheck(const Pickle& pickle)
      : pickle_(pickle),
        visited_(pickle.arena().size()),
        taken_(pickle.arena().size()),
        steps_left_(kMaxHashSteps * pickle.num_bytes() + kFreeHashSteps) {}

  Status run() { return check(pickle_.root(), 0); }

 private:
  static Status refuse(std::string why) { return Status::make(Code::kUnsupported, std::move(why)); }

  Status check(const PickleValue& value, int depth) {
    if (depth > kMaxTreeDepth) return refuse(text("nested more than ", kMaxTreeDepth, " deep"));
    switch (value.kind) {
      case Kind::kHole:
      case Kind::kPersistent:
        return refuse("neither builtin nor of a standard type");
      case Kind::kGlobal:
        if (value.global() < static_cast<uint32_t>(Global::kTorchDType)) return refuse("a class or function");
        return Status::ok();
      case Kind::kTuple:
      case Kind::kList:
      case Kind::kDict:
      case Kind::kSet:
      case Kind::kFrozenSet:
        return check_container(value, depth);
      case Kind::kObject:
      case Kind::kCall:
        return check_object(value, depth);
      default:
        return Status::ok();
    }
  }

  /// Marks what is not empty; false for what was seen before.
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

  /// \param are_hashed  All of them; else the keys of a dict.
  Status check_children(const PickleValue& value, bool are_hashed, int depth) {
    bool is_key = value.is(Kind::kDict);
    for (const PickleValue& child : pickle_.children(value)) {
      if (are_hashed || is_key) BCP_RETURN_IF_ERROR(measure_hash(child, false, depth + 1));
      BCP_RETURN_IF_ERROR(check(child, depth + 1));
      is_key = value.is(Kind::kDict) && !is_key;
    }
    return Status::ok();
  }

  /// Hashing goes through all that a key holds, however often it stands there.
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
    const PickleObject object = *pickle_.object(value);
    const Shape* shape = shape_of(object.global);
    if (shape == nullptr || shape->is_instance != value.is(Kind::kObject)) return refuse("no value of a standard type");
    if (!matches(*shape, object)) return refuse("not what the pickler of its type writes");
    for (const PickleValue& part : {object.args, object.state, object.items}) {
      if (part.is(Kind::kHole)) continue;
      BCP_RETURN_IF_ERROR(check_parts(*shape, part, depth));
    }
    return Status::ok();
  }

  /// Of an object whose signatures match.
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

  /// A list or dict whose values go into an object: nobody else has it, so nobody sees that it was never made.
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
    // A namespace without attributes has no state; an identifier always has.
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
        return !value.is(Kind::kGlobal) || value.global() >= static_cast<uint32_t>(Global::kTorchDType);
    }
  }

  static bool is_int(const PickleValue& value) { return value.is(Kind::kInt) || value.is(Kind::kLong); }

  bool is_call(const PickleValue& value, Global global) const {
    return pickle_.object(value, Kind::kCall, static_cast<uint32_t>(global)).has_value();
  }

  bool is_bytes(const PickleValue& value) const {
    return value.is(Kind::kBytes) || is_call(value, Global::kBytes) || is_call(value, Global::kEncode);
  }

  /// (text, 'latin1') of characters that are bytes.
  bool is_latin1(const PickleValue& args) const {
    const PickleSpan values = pickle_.children(args);
    const std::string_view encoding = pickle_.text(values[1]);
    if (encoding != "latin1" && encoding != "latin-1") return false;
    // In UTF-8 they begin with 0xC2 or 0xC3, or are ASCII.
    const std::string_view chars = pickle_.text(values[0]);
    return std::all_of(chars.begin(), chars.end(), [](char c) { return static_cast<uint8_t>(c) < 0xC4; });
  }

  const Pickle& pickle_;
  std::vector<bool> visited_;  // containers and objects, by their cell
  std::vector<bool> taken_;    // lists and dicts that are arguments
  size_t steps_left_;          // of hashing
};

}  // namespace

PickleRules standard_rules() {
  return {find_standard_global, false, true};
}

Status check_standard(const Pickle& pickle) {
  return StandardCheck(pickle).run();
}

base::Result<std::optional<Pickle>> read_standard_archive(std::string_view archive) {
  std::optional<Pickle> other;
  ArchiveReader reader(archive);
  BCP_ASSIGN_OR_RETURN(const std::optional<PickleEntry> entry, read_value_entry(&reader, archive.size()));
  if (!entry.has_value()) return other;
  base::Result<Pickle> pickle = read_pickle(entry->pickle, standard_rules());
  if (!pickle.is_ok() || pickle.value().end() != entry->pickle.size()) return other;
  if (!check_standard(pickle.value()).is_ok()) return other;
  return std::make_optional(std::move(pickle.value()));
}

}  // namespace bytecheckpoint::format
