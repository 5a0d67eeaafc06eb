// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle/pickle_reader.h"

#include <algorithm>
#include <string>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/base/utf8.h"
#include "csrc/format/pickle/pickle_opcodes.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;
using Kind = PickleValue::Kind;

constexpr uint8_t kLastProtocol = 5;

/// With this limit offsets and cell numbers fit into 32 bits; there are up to 1.5 cells per byte. 2 GiB of metadata are
/// about five million tensors.
constexpr size_t kMaxPickleBytes = size_t{1} << 31;

/// A pickle may number this many memo entries in any way.
constexpr uint32_t kFreeMemoEntries = 256;

/// The stack machine of the pickle format. A method that returns false has set the fault. The first fault is kept.
class Machine {
 public:
  Machine(std::string_view bytes, const PickleRules& rules) : bytes_(bytes), in_(bytes), rules_(rules) {}

  base::Result<Pickle> run() {
    while (in_.remaining() != 0) {
      opcode_at_ = in_.position();
      opcode_ = static_cast<Opcode>(in_.u8());
      const bool done = opcode_ == Opcode::kStop;
      if (!(done ? stop() : step() && in_frame()) || !in_.ok()) return fault();
      if (done) return Pickle(bytes_, std::move(arena_), root_, in_.position());
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
    // An operand that was cut off reads as zeros. Then the fault is that it was cut off, not what the zeros led to.
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
        marks_.push_back(static_cast<uint32_t>(stack_.size()));
        return true;
      case Opcode::kNone:
        return push(PickleValue(Kind::kNone));
      case Opcode::kNewTrue:
      case Opcode::kNewFalse:
        return push(PickleValue(Kind::kBool, opcode_ == Opcode::kNewTrue));
      case Opcode::kBinInt:
      case Opcode::kBinInt1:
      case Opcode::kBinInt2:
      case Opcode::kLong1:
        return integer();
      case Opcode::kBinFloat:
        in_.skip(sizeof(double));
        return push(here(Kind::kFloat));
      case Opcode::kShortBinUnicode:
      case Opcode::kBinUnicode:
      case Opcode::kBinUnicode8:
        return string();
      case Opcode::kShortBinBytes:
      case Opcode::kBinBytes:
        (void)read_text_operand(opcode_, &in_);
        return push(here(Kind::kBytes));
      default:
        return step_on_stack();
    }
  }

  /// Handles opcodes that take something from the stack or the memo, and those of empty containers.
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
        return push(PickleValue(Kind::kTuple));
      case Opcode::kTuple1:
        return tuple(1);
      case Opcode::kTuple2:
        return tuple(2);
      case Opcode::kTuple3:
        return tuple(3);
      case Opcode::kTuple:
        return pop_mark() && tuple(stack_.size() - mark_);
      case Opcode::kEmptyList:
        return push(PickleValue(Kind::kList));
      case Opcode::kEmptyDict:
        return push(PickleValue(Kind::kDict));
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
        if (rules_.standard_types) return step_of_standard_types();
        return refuse_opcode();
    }
  }

  bool step_of_standard_types() {
    switch (opcode_) {
      case Opcode::kEmptySet:
        return push(PickleValue(Kind::kSet));
      case Opcode::kAddItems:
        return pop_mark() && extend(Kind::kSet, stack_.size() - mark_);
      case Opcode::kFrozenSet:
        return pop_mark() && push(arena_.add_frozen_set(&stack_, mark_));
      case Opcode::kByteArray8:
        (void)read_text_operand(opcode_, &in_);
        return push(here(Kind::kByteArray));
      default:
        return refuse_opcode();
    }
  }

  bool refuse_opcode() {
    if (is_opcode(opcode_)) return fail(Code::kUnsupported, "not an opcode that DCP or torch.save write");
    return corrupt("not an opcode of pickle");
  }

  bool stop() {
    if (marks_.size() != 0 || stack_.size() != 1)
      return corrupt(text("the stack must hold 1 value at the end, but holds ", stack_.size()));
    root_ = stack_[0];
    return true;
  }

  bool proto(uint8_t version) {
    return version <= kLastProtocol ||
           fail(Code::kUnsupported, text("protocol ", static_cast<int>(version), " is not supported"));
  }

  bool frame(uint64_t bytes) {
    if (opcode_at_ < frame_end_) return corrupt("a frame within a frame");
    if (bytes > in_.remaining()) return corrupt("a frame longer than the bytes left");
    frame_end_ = in_.position() + bytes;
    return true;
  }

  /// A frame may end only between two opcodes.
  bool in_frame() {
    return opcode_at_ >= frame_end_ || in_.position() <= frame_end_ || corrupt("reaches beyond its frame");
  }

  // --- scalars ---

  bool push(const PickleValue& value) {
    stack_.push_back(value);
    return true;
  }

  /// A value that is stored as the position of its opcode.
  PickleValue here(Kind kind) const { return PickleValue(kind, static_cast<uint32_t>(opcode_at_)); }

  bool integer() {
    if (read_int_operand(opcode_, &in_).has_value()) return push(here(Kind::kInt));
    if (rules_.standard_types) return push(here(Kind::kLong));
    return fail(Code::kUnsupported, "an int beyond 64 bits");
  }

  bool string() {
    return base::is_utf8(read_text_operand(opcode_, &in_)) ? push(here(Kind::kString))
                                                           : corrupt("a string that is not UTF-8");
  }

  // --- stack, marks, memo ---

  /// Number of values above the innermost mark, or of all values if there is no mark.
  size_t available() const { return stack_.size() - (marks_.size() == 0 ? 0 : marks_.back()); }

  bool need(size_t count) {
    return available() >= count ||
           corrupt(text("takes ", count, " values from a stack that holds ", available(), " above its mark"));
  }

  bool pop_mark() {
    if (marks_.size() == 0) return corrupt("no mark on the stack");
    mark_ = marks_.back();
    marks_.truncate(marks_.size() - 1);
    return true;
  }

  bool put(uint32_t index) {
    if (!need(1)) return false;
    // Picklers number their entries from 0 or from 1. A greater number would only make the memo large.
    if (index >= kFreeMemoEntries && index > memo_count_ + 1) {
      return corrupt(text("memo entry ", index, " is too high after ", memo_count_, " entries"));
    }
    while (index >= memo_.size()) memo_.push_back(PickleValue());
    if (memo_[index].is(Kind::kHole)) ++memo_count_;
    arena_.share(&stack_.back());
    memo_[index] = stack_.back();
    return true;
  }

  bool get(uint32_t index) {
    if (index >= memo_.size() || memo_[index].is(Kind::kHole)) return corrupt(text("no memo entry ", index));
    return push(memo_[index]);
  }

  // --- containers ---

  bool tuple(size_t count) { return need(count) && push(arena_.add_tuple(&stack_, stack_.size() - count)); }

  /// Moves the top `count` values into the list or dict below them.
  bool extend(Kind kind, size_t count) {
    if (!need(count + 1)) return false;
    const size_t first = stack_.size() - count;
    PickleValue& target = stack_[first - 1];
    if (target.is(Kind::kObject) || target.is(Kind::kCall)) {
      if (!rules_.standard_types) return fail(Code::kUnsupported, "fills an object that is neither a list nor a dict");
      return fill(target, kind, first);
    }
    if (!target.is(kind)) {
      return corrupt(kind == Kind::kList  ? "appends to something that is not a list"
                     : kind == Kind::kSet ? "adds to something that is not a set"
                                          : "sets items of something that is not a dict");
    }
    if (kind == Kind::kDict && !are_entries(first)) return false;
    arena_.extend(&target, &stack_, first);
    return true;
  }

  bool are_entries(size_t first) {
    if ((stack_.size() - first) % 2 != 0) return corrupt("a key without a value");
    for (size_t i = first; i < stack_.size(); i += 2) {
      if (stack_[i].is(Kind::kList) || stack_[i].is(Kind::kDict)) return corrupt("a list or dict as a key");
    }
    return true;
  }

  bool fill(const PickleValue& target, Kind kind, size_t first) {
    if (kind == Kind::kSet) return corrupt("adds to something that is not a set");
    if (kind == Kind::kDict && !are_entries(first)) return false;
    return arena_.fill(target, kind, &stack_, first) || corrupt("fills an object both as a list and as a dict");
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
    if (!name.is(Kind::kString) || !module.is(Kind::kString)) return corrupt("the name of a global is not a string");
    stack_.truncate(stack_.size() - 2);
    return global(text_of(module), text_of(name));
  }

  bool global(std::string_view module, std::string_view name) {
    const std::optional<uint32_t> number = rules_.global(module, name);
    if (!number.has_value()) return fail(Code::kUnsupported, text("global '", module, ".", name, "' is not allowed"));
    return push(PickleValue(Kind::kGlobal, *number));
  }

  std::string_view text_of(const PickleValue& value) const { return text_at(bytes_, value.at); }

  bool object(Kind kind) {
    if (!need(2)) return false;
    const PickleValue args = stack_.back(), callee = stack_[stack_.size() - 2];
    if (!args.is(Kind::kTuple)) return corrupt("the arguments are not a tuple");
    // This would call what another call has returned, for example. Data need nothing of the kind.
    if (!callee.is(Kind::kGlobal)) return fail(Code::kUnsupported, "calls something that is not a global");
    stack_.truncate(stack_.size() - 2);
    return push(arena_.add_object(kind, callee.global(), args));
  }

  bool build() {
    if (!need(2)) return false;
    const PickleValue state = stack_.back(), target = stack_[stack_.size() - 2];
    if (!target.is(Kind::kObject) && !target.is(Kind::kCall))
      return corrupt("sets the state of something that is not an object");
    if (!arena_.object(target)->state.is(Kind::kHole))
      return corrupt("sets the state of an object that already has one");
    arena_.set_state(target, state);
    stack_.truncate(stack_.size() - 1);
    return true;
  }

  bool persistent_id() {
    if (!rules_.persistent_ids) return fail(Code::kUnsupported, "persistent ids are not allowed");
    if (!need(1)) return false;
    stack_.back() = arena_.add_persistent(stack_.back());
    return true;
  }

  const std::string_view bytes_;
  base::ByteReader in_;
  const PickleRules& rules_;
  PickleArena arena_;
  PickleValue root_;
  PickleArena::Stack stack_;
  base::ChunkedArray<uint32_t> marks_;  // stack heights
  base::ChunkedArray<PickleValue> memo_;
  uint32_t memo_count_ = 0;
  size_t mark_ = 0;  // the mark that pop_mark removed last
  Opcode opcode_ = Opcode::kStop;
  size_t opcode_at_ = 0;
  size_t frame_end_ = 0;
  Code code_ = Code::kCorrupt;
  std::string fault_;
};

}  // namespace

base::Result<Pickle> read_pickle(std::string_view bytes, const PickleRules& rules) {
  if (bytes.size() > kMaxPickleBytes) {
    return Status::make(Code::kUnsupported,
                        text("pickle: has ", bytes.size(), " bytes, but at most ", kMaxPickleBytes, " are read"));
  }
  return Machine(bytes, rules).run();
}

}  // namespace bytecheckpoint::format
