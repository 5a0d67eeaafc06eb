// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle_tree.h"

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

// So that small pickles are not measured too narrowly; a value takes 80 bytes.
constexpr size_t kLeastValues = 1 << 12;
constexpr size_t kLeastTextBytes = 1 << 16;
constexpr size_t kTextFactor = 16;

Status take(size_t count, const char* what, size_t* left) {
  if (count > *left) return Status::make(Code::kCorrupt, text("more ", what, " than a pickle of this size can mean"));
  *left -= count;
  return Status::ok();
}

class Unfolding {
 public:
  Unfolding(const Pickle& pickle, UnfoldBudget* budget, const UnfoldRules& rules)
      : pickle_(pickle), budget_(budget), rules_(rules) {}

  Status unfold(const PickleValue& value, bool as_key, int depth, Tree* out) {
    if (depth > kMaxTreeDepth) {
      return Status::make(Code::kCorrupt, text("nested more than ", kMaxTreeDepth, " deep, or holding itself"));
    }
    switch (value.kind) {
      case Kind::kNone:
        return Status::ok();
      case Kind::kBool:
        out->kind = value.integer != 0 ? Tree::Kind::kTrue : Tree::Kind::kFalse;
        return Status::ok();
      case Kind::kInt:
        out->kind = Tree::Kind::kInt;
        out->integer = value.integer;
        return Status::ok();
      case Kind::kFloat:
        out->kind = Tree::Kind::kFloat;
        out->real = value.real;
        return Status::ok();
      case Kind::kString:
      case Kind::kBytes:
        BCP_RETURN_IF_ERROR(budget_->take_text(value.size));
        out->kind = value.is(Kind::kString) ? Tree::Kind::kString : Tree::Kind::kBytes;
        out->text = std::string(value.text());
        return Status::ok();
      case Kind::kTuple:
      case Kind::kList:
      case Kind::kDict:
        return container(value, as_key, depth, out);
      default:
        return bytes_of_protocol_2(value, out);
    }
  }

 private:
  Status container(const PickleValue& value, bool as_key, int depth, Tree* out) {
    out->kind = value.is(Kind::kTuple)  ? Tree::Kind::kTuple
                : value.is(Kind::kList) ? Tree::Kind::kList
                                        : Tree::Kind::kDict;
    if (as_key && out->kind != Tree::Kind::kTuple) return Status::make(Code::kCorrupt, "a list or dict within a key");
    if (rules_.refuse_shared && out->kind != Tree::Kind::kTuple && !is_first_visit(value)) {
      return Status::make(Code::kUnsupported, "a list or dict that stands in two places");
    }
    const PickleSpan children = pickle_.children(value);
    BCP_RETURN_IF_ERROR(budget_->take_values(children.size()));
    out->children.resize(children.size());
    for (size_t i = 0; i < children.size(); ++i) {
      const bool is_key = as_key || (out->kind == Tree::Kind::kDict && i % 2 == 0);
      BCP_RETURN_IF_ERROR(unfold(children[i], is_key, depth + 1, &out->children[i]));
    }
    return Status::ok();
  }

  bool is_first_visit(const PickleValue& container) {
    if (container.index >= visited_.size()) visited_.resize(container.index + 1);
    const bool first = !visited_[container.index];
    visited_[container.index] = true;
    return first;
  }

  /// encode(text, 'latin1')
  Status bytes_of_protocol_2(const PickleValue& value, Tree* out) {
    const PickleObject* call = rules_.encode.has_value() ? pickle_.object(value, Kind::kCall, *rules_.encode) : nullptr;
    const PickleSpan args = call != nullptr ? pickle_.children(call->args) : PickleSpan();
    if (call == nullptr || !call->state.is(Kind::kHole) || args.size() != 2 || !args[0].is(Kind::kString) ||
        !args[1].is(Kind::kString) || args[1].text() != "latin1" || !base::utf8_to_latin1(args[0].text(), &out->text)) {
      return Status::make(Code::kUnsupported, "an object; only None, bool, int, float, str, bytes, list, tuple, dict");
    }
    out->kind = Tree::Kind::kBytes;
    return budget_->take_text(args[0].size);
  }

  const Pickle& pickle_;
  UnfoldBudget* budget_;
  const UnfoldRules& rules_;
  std::vector<bool> visited_;  // lists and dicts, by their index in the pickle
};

}  // namespace

UnfoldBudget::UnfoldBudget(size_t pickle_bytes)
    : values_left_(std::max(pickle_bytes, kLeastValues)),
      text_left_(std::max(kTextFactor * pickle_bytes, kLeastTextBytes)) {}

base::Status UnfoldBudget::take_values(size_t count) {
  return take(count, "values", &values_left_);
}

base::Status UnfoldBudget::take_text(size_t bytes) {
  return take(bytes, "text", &text_left_);
}

base::Result<Tree> unfold_tree(const Pickle& pickle, const PickleValue& value, UnfoldBudget* budget,
                               const UnfoldRules& rules) {
  Tree tree;
  BCP_RETURN_IF_ERROR(Unfolding(pickle, budget, rules).unfold(value, false, 0, &tree));
  return tree;
}

}  // namespace bytecheckpoint::format
