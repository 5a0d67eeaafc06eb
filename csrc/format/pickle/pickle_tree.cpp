// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle/pickle_tree.h"

#include <algorithm>
#include <string>
#include <vector>

#include "csrc/base/utf8.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;
using Kind = PickleValue::Kind;

constexpr size_t kMaxTimes = 15;
/// Added to the limit, so that it is not too tight for small pickles.
constexpr size_t kFreeBytes = 32 << 10;

/// Measures a value before it writes it, because a buffer that grows takes three times what it holds.
class Unfolding {
 public:
  Unfolding(const Pickle& pickle, UnfoldBudget* budget, const UnfoldRules& rules)
      : pickle_(pickle), budget_(budget), rules_(rules) {
    if (rules.refuse_shared) visited_.resize(pickle.arena().size());
  }

  base::Result<Tree> run(const PickleValue& value) {
    BCP_RETURN_IF_ERROR(measure(value, {}, 0));
    out_.reserve(num_bytes_);
    write(value);
    return Tree::from_encoded(out_.take());
  }

 private:
  /// What is known of the containers that hold a value.
  struct Holder {
    bool is_key = false;    // the value is a key, or inside one
    bool was_seen = false;  // one of the containers that hold it stands in another place, too
  };

  Status measure(const PickleValue& value, Holder holder, int depth) {
    if (depth > kMaxTreeDepth) {
      return Status::make(Code::kCorrupt, text("nested more than ", kMaxTreeDepth, " deep, or holds itself"));
    }
    switch (value.kind) {
      case Kind::kNone:
      case Kind::kBool:
        return take(kConstantBytes);
      case Kind::kInt:
      case Kind::kFloat:
        return take(kNumberBytes);
      case Kind::kString:
      case Kind::kBytes:
        return take(kTextHeadBytes + pickle_.text(value).size());
      case Kind::kTuple:
      case Kind::kList:
      case Kind::kDict:
        return measure_container(value, holder, depth);
      default:
        break;
    }
    std::string latin1;
    if (!is_latin1(value, &latin1)) {
      return Status::make(Code::kUnsupported,
                          "an object; only None, bool, int, float, str, bytes, list, tuple and dict can be read");
    }
    return take(kTextHeadBytes + latin1.size());
  }

  Status measure_container(const PickleValue& value, Holder holder, int depth) {
    const bool is_tuple = value.is(Kind::kTuple), is_dict = value.is(Kind::kDict);
    if (holder.is_key && !is_tuple) return Status::make(Code::kCorrupt, "a key holds a list or dict");
    holder.was_seen |= rules_.refuse_shared && !is_first_visit(value);
    if (holder.was_seen && !is_tuple) {
      return Status::make(Code::kUnsupported, "a list or dict is in two places");
    }
    BCP_RETURN_IF_ERROR(take(kContainerBytes));
    bool is_key = is_dict;
    for (const PickleValue& child : pickle_.children(value)) {
      BCP_RETURN_IF_ERROR(measure(child, {holder.is_key || is_key, holder.was_seen}, depth + 1));
      is_key = is_dict && !is_key;
    }
    return Status::ok();
  }

  Status take(size_t bytes) {
    num_bytes_ += bytes;
    return budget_->take(bytes);
  }

  bool is_first_visit(const PickleValue& container) {
    if (container.at == 0) return true;  // empty and not shared by itself; its holder may be
    const bool first = !visited_[container.at];
    visited_[container.at] = true;
    return first;
  }

  /// Writes a value that was measured.
  void write(const PickleValue& value) {
    switch (value.kind) {
      case Kind::kNone:
        return encode_constant(Tree::Kind::kNone, &out_);
      case Kind::kBool:
        return encode_constant(value.is_true() ? Tree::Kind::kTrue : Tree::Kind::kFalse, &out_);
      case Kind::kInt:
        return encode_int(pickle_.integer(value), &out_);
      case Kind::kFloat:
        return encode_float(pickle_.real(value), &out_);
      case Kind::kString:
        return encode_text(Tree::Kind::kString, pickle_.text(value), &out_);
      case Kind::kBytes:
        return encode_text(Tree::Kind::kBytes, pickle_.text(value), &out_);
      case Kind::kTuple:
        return write_container(Tree::Kind::kTuple, value);
      case Kind::kList:
        return write_container(Tree::Kind::kList, value);
      case Kind::kDict:
        return write_container(Tree::Kind::kDict, value);
      default:
        break;
    }
    std::string latin1;
    (void)is_latin1(value, &latin1);
    encode_text(Tree::Kind::kBytes, latin1, &out_);
  }

  void write_container(Tree::Kind kind, const PickleValue& value) {
    const PickleSpan children = pickle_.children(value);
    encode_container(kind, children.size(), &out_);
    for (const PickleValue& child : children) write(child);
  }

  /// Recognises bytes of protocol 2, encode(text, 'latin1'), and decodes them.
  bool is_latin1(const PickleValue& value, std::string* bytes) const {
    if (!rules_.encode.has_value()) return false;
    const std::optional<PickleObject> call = pickle_.object(value, Kind::kCall, *rules_.encode);
    if (!call.has_value() || !call->state.is(Kind::kHole)) return false;
    const PickleSpan args = pickle_.children(call->args);
    return args.size() == 2 && args[0].is(Kind::kString) && args[1].is(Kind::kString) &&
           pickle_.text(args[1]) == "latin1" && base::utf8_to_latin1(pickle_.text(args[0]), bytes);
  }

  const Pickle& pickle_;
  UnfoldBudget* budget_;
  const UnfoldRules& rules_;
  std::vector<bool> visited_;  // containers that were visited, by their cell
  size_t num_bytes_ = 0;
  base::ByteWriter out_;
};

}  // namespace

UnfoldBudget::UnfoldBudget(const Pickle& pickle) : left_(kMaxTimes * pickle.num_bytes() + kFreeBytes) {
  left_ -= std::min(left_, pickle.arena().num_bytes());
}

Status UnfoldBudget::take(size_t bytes) {
  if (bytes > left_) return Status::make(Code::kCorrupt, "there are more values than a pickle of this size may hold");
  left_ -= bytes;
  return Status::ok();
}

base::Result<Tree> unfold_tree(const Pickle& pickle, const PickleValue& value, UnfoldBudget* budget,
                               const UnfoldRules& rules) {
  return Unfolding(pickle, budget, rules).run(value);
}

}  // namespace bytecheckpoint::format
