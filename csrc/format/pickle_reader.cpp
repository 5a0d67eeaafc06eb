// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle_reader.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/base/utf8.h"
#include "csrc/format/pickle_opcodes.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;
using Kind = PickleValue::Kind;

constexpr uint8_t kLastProtocol = 5;

PickleValue value_of(Kind kind, int64_t integer = 0) {
  PickleValue value;
  value.kind = kind;
  value.integer = integer;
  return value;
}

PickleValue reference(Kind kind, size_t index) {
  PickleValue value;
  value.kind = kind;
  value.index = index;
  return value;
}

PickleValue text_value(Kind kind, std::string_view bytes) {
  PickleValue value;
  value.kind = kind;
  value.size = static_cast<uint32_t>(bytes.size());
  value.begin = bytes.data();
  return value;
}

/// The stack machine of the pickle format. The first fault found is kept; a method that returns false has set it.
class Machine {
 public:
  Machine(std::string_view bytes, const PickleRules& rules) : bytes_(bytes), in_(bytes), rules_(rules) {}

  base::Result<Pickle> run() {
    while (in_.remaining() != 0) {
      opcode_at_ = in_.position();
      opcode_ = static_cast<Opcode>(in_.u8());
      const bool done = opcode_ == Opcode::kStop;
      if (!(done ? stop() : step() && in_frame()) || !in_.ok()) return fault();
      if (done) return Pickle(std::move(arena_), root_, in_.position());
    }
    return Status::make(Code::kCorrupt, text("pickle: ends at byte ", bytes_.size(), " without STOP"));
  }

 private:
  // --- faults ---

  bool fail(Code code, std::string fault) {
    code_ = code;
    fault_ = std::move(fault);
    return false;
  }
  bool corrupt(std::string fault) { return fail(Code::kCorrupt, std::move(fault)); }

  Status fault() const {
    const std::string where = text("pickle: ", opcode_name(opcode_), " at byte ", opcode_at_, ": ");
    // Operands that were cut off read as zeros; that they were cut off is the fault, not what the zeros led to.
    if (!in_.ok()) return Status::make(Code::kCorrupt, text(where, "cut off at byte ", bytes_.size()));
    return Status::make(code_, text(where, fault_, "; nothing of the pickle was run"));
  }

  // --- opcodes ---

  bool step() {
    switch (opcode_) {
      case Opcode::kProto:
        return proto(in_.u8());
      case Opcode::kFrame:
        return frame(in_.u64());
      case Opcode::kMark:
        marks_.push_back(stack_.size());
        return true;
      case Opcode::kNone:
        return push(value_of(Kind::kNone));
      case Opcode::kNewTrue:
        return push(value_of(Kind::kBool, 1));
      case Opcode::kNewFalse:
        return push(value_of(Kind::kBool, 0));
      case Opcode::kBinInt:
        return push(value_of(Kind::kInt, static_cast<int32_t>(in_.u32())));
      case Opcode::kBinInt1:
        return push(value_of(Kind::kInt, in_.u8()));
      case Opcode::kBinInt2:
        return push(value_of(Kind::kInt, in_.u16()));
      case Opcode::kLong1:
        return long_int(in_.view(in_.u8()));
      case Opcode::kBinFloat:
        return binary_float(in_.u64());
      case Opcode::kShortBinUnicode:
        return string(in_.view(in_.u8()));
      case Opcode::kBinUnicode:
        return string(in_.view(in_.u32()));
      case Opcode::kBinUnicode8:
        return string(in_.view(in_.u64()));
      case Opcode::kShortBinBytes:
        return push(text_value(Kind::kBytes, in_.view(in_.u8())));
      case Opcode::kBinBytes:
        return push(text_value(Kind::kBytes, in_.view(in_.u32())));
      default:
        return step_on_stack();
    }
  }

  /// Opcodes that take something from the stack or the memo, and the empty containers.
  bool step_on_stack() {
    switch (opcode_) {
      case Opcode::kMemoize:
        return put(memo_count_);
      case Opcode::kBinPut:
        return put(in_.u8());
      case Opcode::kLongBinPut:
        return put(in_.u32());
      case Opcode::kBinGet:
        return get(in_.u8());
      case Opcode::kLongBinGet:
        return get(in_.u32());
      case Opcode::kEmptyTuple:
        return tuple(0);
      case Opcode::kTuple1:
        return tuple(1);
      case Opcode::kTuple2:
        return tuple(2);
      case Opcode::kTuple3:
        return tuple(3);
      case Opcode::kTuple:
        return pop_mark() && tuple(stack_.size() - mark_);
      case Opcode::kEmptyList:
        return container(Kind::kList);
      case Opcode::kEmptyDict:
        return container(Kind::kDict);
      case Opcode::kAppend:
        return extend(Kind::kList, 1);
      case Opcode::kAppends:
        return pop_mark() && extend(Kind::kList, stack_.size() - mark_);
      case Opcode::kSetItem:
        return extend(Kind::kDict, 2);
      case Opcode::kSetItems:
        return pop_mark() && extend(Kind::kDict, stack_.size() - mark_);
      case Opcode::kGlobal:
        return named_global();
      case Opcode::kStackGlobal:
        return stack_global();
      case Opcode::kNewObj:
        return object(Kind::kObject);
      case Opcode::kReduce:
        return object(Kind::kCall);
      case Opcode::kBuild:
        return build();
      case Opcode::kBinPersId:
        return persistent_id();
      default:
        if (is_opcode(opcode_)) return fail(Code::kUnsupported, "not an opcode that DCP or torch.save write");
        return corrupt("not an opcode of pickle");
    }
  }

  bool stop() {
    if (!marks_.empty() || stack_.size() != 1) return corrupt(text(stack_.size(), " values on the stack, wanted 1"));
    root_ = stack_[0];
    return true;
  }

  bool proto(uint8_t version) {
    return version <= kLastProtocol || fail(Code::kUnsupported, text("protocol ", static_cast<int>(version)));
  }

  bool frame(uint64_t bytes) {
    if (opcode_at_ < frame_end_) return corrupt("a frame within a frame");
    if (bytes > in_.remaining()) return corrupt("a frame longer than the bytes left");
    frame_end_ = in_.position() + bytes;
    return true;
  }

  /// A frame ends between two opcodes, never within one.
  bool in_frame() {
    return opcode_at_ >= frame_end_ || in_.position() <= frame_end_ || corrupt("reaches beyond its frame");
  }

  // --- scalars ---

  bool push(PickleValue value) {
    stack_.push_back(value);
    return true;
  }

  bool long_int(std::string_view bytes) {
    // Two's complement, little-endian, sign in the last byte; more than 8 bytes only if they merely repeat the sign.
    const bool negative = !bytes.empty() && (bytes.back() & 0x80) != 0;
    uint64_t bits = negative ? ~uint64_t{0} : 0;
    if (!bytes.empty()) std::memcpy(&bits, bytes.data(), std::min(bytes.size(), sizeof bits));
    const auto number = static_cast<int64_t>(bits);
    bool fits = (number < 0) == negative;
    for (size_t i = sizeof bits; i < bytes.size(); ++i) fits = fits && bytes[i] == (negative ? '\xFF' : '\0');
    return fits ? push(value_of(Kind::kInt, number)) : fail(Code::kUnsupported, "an int beyond 64 bits");
  }

  bool binary_float(uint64_t big_endian) {
    const uint64_t bits = __builtin_bswap64(big_endian);
    PickleValue value = value_of(Kind::kFloat);
    std::memcpy(&value.real, &bits, sizeof bits);
    return push(value);
  }

  bool string(std::string_view bytes) {
    return base::is_utf8(bytes) ? push(text_value(Kind::kString, bytes)) : corrupt("a string that is not UTF-8");
  }

  // --- stack, marks, memo ---

  /// Values above the innermost mark, or all of them.
  size_t available() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }

  bool need(size_t count) {
    return available() >= count ||
           corrupt(text("takes ", count, " values from a stack that holds ", available(), " above its mark"));
  }

  bool pop_mark() {
    if (marks_.empty()) return corrupt("no mark on the stack");
    mark_ = marks_.back();
    marks_.pop_back();
    return true;
  }

  bool put(uint32_t index) {
    if (!need(1)) return false;
    // A pickler numbers what it has written; a greater number would only make the memo large.
    if (index >= bytes_.size()) return corrupt(text("memo entry ", index, " in ", bytes_.size(), " bytes"));
    if (index >= memo_.size()) memo_.resize(index + 1);
    if (memo_[index].is(Kind::kHole)) ++memo_count_;
    memo_[index] = stack_.back();
    return true;
  }

  bool get(uint32_t index) {
    if (index >= memo_.size() || memo_[index].is(Kind::kHole)) return corrupt(text("no memo entry ", index));
    return push(memo_[index]);
  }

  // --- containers ---

  bool tuple(size_t count) {
    if (!need(count)) return false;
    PickleValue value = reference(Kind::kTuple, arena_.tuples.size());
    value.size = static_cast<uint32_t>(count);
    arena_.tuples.insert(arena_.tuples.end(), stack_.end() - static_cast<std::ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    return push(value);
  }

  bool container(Kind kind) {
    arena_.lists.emplace_back();
    return push(reference(kind, arena_.lists.size() - 1));
  }

  /// Moves the top `count` values into the list or dict below them.
  bool extend(Kind kind, size_t count) {
    if (!need(count + 1)) return false;
    const size_t first = stack_.size() - count;
    const PickleValue target = stack_[first - 1];
    if (target.is(Kind::kObject) || target.is(Kind::kCall)) {
      return fail(Code::kUnsupported, "fills an object that is neither list nor dict");
    }
    if (!target.is(kind)) return corrupt(kind == Kind::kList ? "appends to what is no list" : "sets items of no dict");
    if (kind == Kind::kDict) {
      if (count % 2 != 0) return corrupt("a key without a value");
      for (size_t i = first; i < stack_.size(); i += 2) {
        if (stack_[i].is(Kind::kList) || stack_[i].is(Kind::kDict)) return corrupt("a list or dict as a key");
      }
    }
    std::vector<PickleValue>& list = arena_.lists[target.index];
    list.insert(list.end(), stack_.begin() + static_cast<std::ptrdiff_t>(first), stack_.end());
    stack_.resize(first);
    return true;
  }

  // --- globals and objects ---

  bool line(std::string_view* out) {
    const size_t end = bytes_.find('\n', in_.position());
    if (end == bytes_.npos) return corrupt("a name without an end");
    *out = in_.view(end - in_.position());
    in_.skip(1);
    return base::is_utf8(*out) || corrupt("a name that is not UTF-8");
  }

  bool named_global() {
    std::string_view module, name;
    return line(&module) && line(&name) && global(module, name);
  }

  bool stack_global() {
    if (!need(2)) return false;
    const PickleValue name = stack_.back(), module = stack_[stack_.size() - 2];
    if (!name.is(Kind::kString) || !module.is(Kind::kString)) return corrupt("a global whose name is no string");
    stack_.resize(stack_.size() - 2);
    return global(module.text(), name.text());
  }

  bool global(std::string_view module, std::string_view name) {
    const std::optional<uint32_t> number = rules_.global(module, name);
    if (!number.has_value()) return fail(Code::kUnsupported, text("global '", module, ".", name, "' is not allowed"));
    PickleValue value = value_of(Kind::kGlobal);
    value.global = *number;
    return push(value);
  }

  bool object(Kind kind) {
    if (!need(2)) return false;
    PickleObject object;
    object.args = stack_.back();
    const PickleValue callee = stack_[stack_.size() - 2];
    if (!object.args.is(Kind::kTuple)) return corrupt("arguments that are no tuple");
    // Calling what a call returned, for one. Data need no such thing.
    if (!callee.is(Kind::kGlobal)) return fail(Code::kUnsupported, "of something that is no global");
    object.global = callee.global;
    stack_.resize(stack_.size() - 2);
    arena_.objects.push_back(object);
    return push(reference(kind, arena_.objects.size() - 1));
  }

  bool build() {
    if (!need(2)) return false;
    const PickleValue state = stack_.back(), target = stack_[stack_.size() - 2];
    if (!target.is(Kind::kObject) && !target.is(Kind::kCall)) return corrupt("of something that is no object");
    PickleObject& object = arena_.objects[target.index];
    if (!object.state.is(Kind::kHole)) return corrupt("of an object that has its state");
    object.state = state;
    stack_.pop_back();
    return true;
  }

  bool persistent_id() {
    if (!rules_.persistent_ids) return fail(Code::kUnsupported, "persistent ids are not allowed");
    if (!need(1)) return false;
    PickleObject object;
    object.args = stack_.back();
    stack_.pop_back();
    arena_.objects.push_back(object);
    return push(reference(Kind::kPersistent, arena_.objects.size() - 1));
  }

  const std::string_view bytes_;
  base::ByteReader in_;
  const PickleRules& rules_;
  Pickle::Arena arena_;
  PickleValue root_;
  std::vector<PickleValue> stack_;
  std::vector<size_t> marks_;  // stack heights
  std::vector<PickleValue> memo_;
  uint32_t memo_count_ = 0;
  size_t mark_ = 0;  // the one that pop_mark took
  Opcode opcode_ = Opcode::kStop;
  size_t opcode_at_ = 0;
  size_t frame_end_ = 0;
  Code code_ = Code::kCorrupt;
  std::string fault_;
};

}  // namespace

PickleSpan Pickle::children(const PickleValue& value) const {
  if (value.is(Kind::kTuple)) return {arena_.tuples.data() + value.index, value.size};
  if (!value.is(Kind::kList) && !value.is(Kind::kDict)) return {};
  const std::vector<PickleValue>& list = arena_.lists[value.index];
  return {list.data(), list.size()};
}

const PickleObject* Pickle::object(const PickleValue& value) const {
  const bool is_object = value.is(Kind::kObject) || value.is(Kind::kCall) || value.is(Kind::kPersistent);
  return is_object ? &arena_.objects[value.index] : nullptr;
}

const PickleObject* Pickle::object(const PickleValue& value, Kind kind, uint32_t global) const {
  const PickleObject* found = value.is(kind) ? object(value) : nullptr;
  return found != nullptr && found->global == global ? found : nullptr;
}

base::Result<Pickle> read_pickle(std::string_view bytes, const PickleRules& rules) {
  // Sizes and memo numbers then fit into 32 bits. 4 GiB of metadata are some ten million tensors.
  if (bytes.size() > UINT32_MAX) {
    return Status::make(Code::kUnsupported, text("pickle: ", bytes.size(), " bytes, read are at most ", UINT32_MAX));
  }
  return Machine(bytes, rules).run();
}

}  // namespace bytecheckpoint::format
