// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle/pickle_copy.h"

#include "csrc/format/pickle/pickle_opcodes.h"
#include "csrc/format/pickle/standard_globals.h"
#include "csrc/format/tree.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;
using Kind = PickleValue::Kind;

/// Shorter texts take no less as references.
constexpr size_t kShortText = 4;

constexpr uint8_t byte_of(Opcode opcode) {
  return static_cast<uint8_t>(opcode);
}

/// Tells values that are positions in the pickle from those that are cells.
constexpr uint64_t kText = uint64_t{1} << 32;

}  // namespace

uint32_t GlobalNames::number_of(std::string_view module, std::string_view name) {
  const std::optional<uint32_t> standard = find_standard_global(module, name);
  const uint32_t number =
      standard.has_value()
          ? *standard
          : others_.emplace(Name(module, name), kFirstOther + static_cast<uint32_t>(others_.size())).first->second;
  names_.emplace(number, Name(module, name));
  return number;
}

std::string GlobalNames::text_of(uint32_t number) const {
  return text(name_of(number).first, ".", name_of(number).second);
}

PickleRules GlobalNames::rules() {
  return {[this](std::string_view module, std::string_view name) { return number_of(module, name); }, true, true};
}

base::Result<std::string> PickleCopier::copy(const PickleValue& value, size_t most_bytes) {
  out_ = base::ByteWriter();
  memo_.clear();
  most_bytes_ = most_bytes;
  const bool has_protocol = bytes_.size() > 1 && static_cast<uint8_t>(bytes_[0]) == byte_of(Opcode::kProto);
  out_.u8(byte_of(Opcode::kProto));
  out_.u8(has_protocol ? static_cast<uint8_t>(bytes_[1]) : 2);
  BCP_RETURN_IF_ERROR(write(value, 0));
  out_.u8(byte_of(Opcode::kStop));
  return out_.take();
}

Status PickleCopier::write(const PickleValue& value, int depth) {
  if (depth > kMaxTreeDepth) return Status::make(Code::kUnsupported, text("nested deeper than ", kMaxTreeDepth));
  if (out_.size() > most_bytes_) return Status::make(Code::kUnsupported, "it stands in too many places");
  switch (value.kind) {
    case Kind::kNone:
      out_.u8(byte_of(Opcode::kNone));
      return Status::ok();
    case Kind::kBool:
      out_.u8(byte_of(value.is_true() ? Opcode::kNewTrue : Opcode::kNewFalse));
      return Status::ok();
    case Kind::kInt:
    case Kind::kLong:
    case Kind::kFloat:
      write_scalar(value.at);
      return Status::ok();
    case Kind::kString:
    case Kind::kBytes:
    case Kind::kByteArray:
      if (pickle_.text(value).size() <= kShortText) {
        write_scalar(value.at);
      } else if (!recall(kText | value.at)) {
        write_scalar(value.at);
        memoise(kText | value.at);
      }
      return Status::ok();
    case Kind::kGlobal:
      return write_global(value.global());
    case Kind::kPersistent:
      return Status::make(Code::kUnsupported, "it holds tensors");
    case Kind::kHole:
      return Status::make(Code::kUnsupported, "it holds nothing");
    default:
      break;
  }
  if (value.at != 0 && recall(value.at)) return Status::ok();
  if (value.is(Kind::kObject) || value.is(Kind::kCall)) return write_object(value, depth);
  return write_children(value, depth);
}

Status PickleCopier::write_object(const PickleValue& value, int depth) {
  const PickleObject object = *pickle_.object(value);
  BCP_RETURN_IF_ERROR(write_global(object.global));
  BCP_RETURN_IF_ERROR(write(object.args, depth + 1));
  out_.u8(byte_of(value.is(Kind::kObject) ? Opcode::kNewObj : Opcode::kReduce));
  memoise(value.at);
  if (!object.items.is(Kind::kHole)) {
    out_.u8(byte_of(Opcode::kMark));
    for (const PickleValue& child : pickle_.children(object.items)) BCP_RETURN_IF_ERROR(write(child, depth + 1));
    out_.u8(byte_of(object.items.is(Kind::kDict) ? Opcode::kSetItems : Opcode::kAppends));
  }
  if (!object.state.is(Kind::kHole)) {
    BCP_RETURN_IF_ERROR(write(object.state, depth + 1));
    out_.u8(byte_of(Opcode::kBuild));
  }
  return Status::ok();
}

Status PickleCopier::write_children(const PickleValue& value, int depth) {
  const PickleSpan children = pickle_.children(value);
  // A list, dict or set may hold itself, so it is made before its children. A tuple or frozenset is made of them.
  const bool is_made_first = value.is(Kind::kList) || value.is(Kind::kDict) || value.is(Kind::kSet);
  if (is_made_first) {
    out_.u8(byte_of(value.is(Kind::kList)   ? Opcode::kEmptyList
                    : value.is(Kind::kDict) ? Opcode::kEmptyDict
                                            : Opcode::kEmptySet));
    if (value.at != 0) memoise(value.at);
    if (children.size() == 0) return Status::ok();
  } else if (value.is(Kind::kTuple) && children.size() == 0) {
    out_.u8(byte_of(Opcode::kEmptyTuple));
    return Status::ok();
  }
  out_.u8(byte_of(Opcode::kMark));
  for (const PickleValue& child : children) BCP_RETURN_IF_ERROR(write(child, depth + 1));
  switch (value.kind) {
    case Kind::kList:
      out_.u8(byte_of(Opcode::kAppends));
      break;
    case Kind::kDict:
      out_.u8(byte_of(Opcode::kSetItems));
      break;
    case Kind::kSet:
      out_.u8(byte_of(Opcode::kAddItems));
      break;
    case Kind::kTuple:
      out_.u8(byte_of(Opcode::kTuple));
      break;
    default:
      out_.u8(byte_of(Opcode::kFrozenSet));
  }
  if (!is_made_first && value.at != 0) memoise(value.at);
  return Status::ok();
}

Status PickleCopier::write_global(uint32_t number) {
  const auto& [module, name] = names_.name_of(number);
  // The names of this opcode end with a line. One that has a line break would become opcodes.
  if (module.find('\n') != module.npos || name.find('\n') != name.npos) {
    return Status::make(Code::kUnsupported, "it names a class with a line break");
  }
  out_.u8(byte_of(Opcode::kGlobal));
  out_.raw(module);
  out_.u8('\n');
  out_.raw(name);
  out_.u8('\n');
  return Status::ok();
}

void PickleCopier::write_scalar(uint32_t at) {
  base::ByteReader in(bytes_.substr(at));
  (void)skip_operand(static_cast<Opcode>(in.u8()), &in);
  out_.raw(bytes_.substr(at, in.position()));
}

bool PickleCopier::recall(uint64_t key) {
  const auto found = memo_.find(key);
  if (found == memo_.end()) return false;
  const bool is_small = found->second < 256;
  out_.u8(byte_of(is_small ? Opcode::kBinGet : Opcode::kLongBinGet));
  if (is_small) {
    out_.u8(static_cast<uint8_t>(found->second));
  } else {
    out_.u32(found->second);
  }
  return true;
}

void PickleCopier::memoise(uint64_t key) {
  const auto number = static_cast<uint32_t>(memo_.size());
  if (!memo_.emplace(key, number).second) return;
  out_.u8(byte_of(number < 256 ? Opcode::kBinPut : Opcode::kLongBinPut));
  if (number < 256) {
    out_.u8(static_cast<uint8_t>(number));
  } else {
    out_.u32(number);
  }
}

}  // namespace bytecheckpoint::format
