// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/torch_values.h"

#include <unordered_map>
#include <utility>

#include "csrc/format/pickle/standard_globals.h"
#include "csrc/format/torch/pickled_dtensor.h"
#include "csrc/format/tree.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;
using Kind = PickleValue::Kind;

class Flattener {
 public:
  Flattener(const Pickle& pickle, const GlobalNames& names, TorchBudget* budget)
      : pickle_(pickle), names_(names), budget_(*budget) {}

  base::Result<std::vector<TorchValue>> run(std::string_view root) {
    if (!root.empty()) {
      base::ByteWriter encoded;
      encode_text(Tree::Kind::kString, root, &encoded);
      BCP_RETURN_IF_ERROR(visit(std::string(root), encoded.take(), pickle_.root(), 0));
      return std::move(values_);
    }
    const std::optional<PickleSpan> dict = dict_of(pickle_.root());
    if (!dict.has_value()) {
      return Status::make(Code::kUnsupported, text("it holds ", describe(pickle_.root()),
                                                   ", not a dict: load it with torch.load and save a state dict"));
    }
    BCP_RETURN_IF_ERROR(enter_dict(*dict, 0));
    return std::move(values_);
  }

 private:
  /// Returns the keys and values of what Python makes a dict of.
  std::optional<PickleSpan> dict_of(const PickleValue& value) const {
    if (value.is(Kind::kDict)) return pickle_.children(value);
    const std::optional<PickleObject> object = pickle_.object(value);
    if (!object.has_value() || value.is(Kind::kPersistent)) return std::nullopt;
    const auto global = static_cast<StandardGlobal>(object->global);
    const PickleSpan args = pickle_.children(object->args);
    if (global == StandardGlobal::kCounter && args.size() == 1 && args[0].is(Kind::kDict)) {
      return pickle_.children(args[0]);
    }
    const bool is_made_empty =
        (global == StandardGlobal::kOrderedDict && args.size() == 0) || global == StandardGlobal::kDefaultDict;
    if (object->items.is(Kind::kDict) && (is_made_empty || value.is(Kind::kObject))) {
      return pickle_.children(object->items);
    }
    return is_made_empty && object->items.is(Kind::kHole) ? std::make_optional(PickleSpan()) : std::nullopt;
  }

  /// Returns `a list`, or the name of a class, for a message.
  std::string describe(const PickleValue& value) const {
    if (read_pickled_tensor(pickle_, value).has_value()) return "a tensor";
    switch (value.kind) {
      case Kind::kList:
        return "a list";
      case Kind::kTuple:
        return "a tuple";
      case Kind::kGlobal:
        return names_.text_of(value.global());
      case Kind::kObject:
      case Kind::kCall:
        return text("an object of ", names_.text_of(pickle_.object(value)->global));
      default:
        return "a plain value";
    }
  }

  /// Whether torch makes a tensor of it, of whatever kind.
  bool is_any_tensor(const PickleValue& value) const {
    if (!value.is(Kind::kCall)) return false;
    const auto& [module, name] = names_.name_of(pickle_.object(value)->global);
    return module.substr(0, 5) == "torch" && name.substr(0, 9) == "_rebuild_";
  }

  /// Whether a list holds a tensor or a dict, in it or in lists below it.
  base::Result<bool> is_entered(const PickleValue& list, int depth) {
    if (depth > kMaxTreeDepth) return too_deep();
    if (list.at == 0) return false;  // empty
    const auto known = lists_.find(list.at);
    if (known != lists_.end()) return known->second;
    lists_.emplace(list.at, false);  // for a list that holds itself
    BCP_RETURN_IF_ERROR(budget_.take(kListBytes));
    for (const PickleValue& value : pickle_.children(list)) {
      bool is_found = dict_of(value).has_value() || is_any_tensor(value);
      if (!is_found && value.is(Kind::kList)) {
        BCP_ASSIGN_OR_RETURN(is_found, is_entered(value, depth + 1));
      }
      if (is_found) {
        lists_[list.at] = true;
        return true;
      }
    }
    return false;
  }

  static Status too_deep() {
    return Status::make(Code::kCorrupt, text("dicts and lists are nested deeper than ", kMaxTreeDepth));
  }

  /// Returns `str(key)`; nothing for a key whose text only Python knows.
  std::optional<std::string> text_of_key(const PickleValue& key) const {
    switch (key.kind) {
      case Kind::kString:
        return std::string(pickle_.text(key));
      case Kind::kInt:
        return std::to_string(pickle_.integer(key));
      case Kind::kBool:
        return key.is_true() ? "True" : "False";
      case Kind::kNone:
        return "None";
      default:
        return std::nullopt;
    }
  }

  Status enter_dict(const PickleSpan& dict, int depth) {
    if (depth > kMaxTreeDepth) return too_deep();
    for (auto at = dict.begin(); at != dict.end(); ++at) {
      const PickleValue key = *at;
      ++at;
      BCP_RETURN_IF_ERROR(budget_.take(name_.size() + pickle_.text(key).size() + 1));
      std::optional<std::string> step = text_of_key(key);
      if (!step.has_value()) {
        return add_refused("a dict has a key that is neither a text nor a whole number, so its values have no names");
      }
      base::ByteWriter encoded;
      encode_text(Tree::Kind::kString, *step, &encoded);
      BCP_RETURN_IF_ERROR(visit(*step, encoded.take(), *at, depth));
    }
    return Status::ok();
  }

  Status enter_list(const PickleSpan& list, int depth) {
    int64_t position = 0;
    for (const PickleValue& value : list) {
      BCP_RETURN_IF_ERROR(budget_.take(name_.size() + 1));
      base::ByteWriter encoded;
      encode_int(position, &encoded);
      BCP_RETURN_IF_ERROR(visit(std::to_string(position), encoded.take(), value, depth));
      ++position;
    }
    return Status::ok();
  }

  Status visit(const std::string& step, std::string encoded, const PickleValue& value, int depth) {
    const size_t outer = name_.size();
    if (!path_.empty()) name_ += '.';
    name_ += step;
    path_.push_back(std::move(encoded));
    Status outcome = visit_here(value, depth);
    path_.pop_back();
    name_.resize(outer);
    return outcome;
  }

  Status visit_here(const PickleValue& value, int depth) {
    if (const std::optional<PickleSpan> dict = dict_of(value); dict.has_value()) return enter_dict(*dict, depth + 1);
    if (value.is(Kind::kList)) {
      if (depth > kMaxTreeDepth) return too_deep();
      BCP_ASSIGN_OR_RETURN(const bool enters, is_entered(value, depth));
      if (enters) return enter_list(pickle_.children(value), depth + 1);
    }
    BCP_RETURN_IF_ERROR(add(value));
    if (is_any_tensor(value)) {
      TorchValue& added = values_.back();
      if (is_pickled_dtensor(pickle_, names_, value)) {
        add_part(value, &added);
        return Status::ok();
      }
      added.tensor = read_pickled_tensor(pickle_, names_, value);
      if (!added.tensor.has_value()) {
        added.refusal = text("it is a tensor that ", names_.text_of(pickle_.object(value)->global),
                             " makes (quantized, sparse or of a subclass)");
      }
    }
    return Status::ok();
  }

  void add_part(const PickleValue& dtensor, TorchValue* added) const {
    std::optional<PickledDTensor> read = read_pickled_dtensor(pickle_, names_, dtensor, &added->refusal);
    if (!read.has_value()) return;
    added->tensor = std::move(read->local);
    added->box = std::move(read->box);
    added->global_sizes = std::move(read->global_sizes);
  }

  Status add(const PickleValue& value) {
    size_t path_bytes = kContainerBytes;
    for (const std::string& step : path_) path_bytes += step.size();
    BCP_RETURN_IF_ERROR(budget_.take(sizeof(TorchValue) + name_.size() + path_bytes));
    TorchValue& added = values_.emplace_back();
    added.fqn = name_;
    base::ByteWriter path;
    path.reserve(path_bytes);
    encode_container(Tree::Kind::kTuple, path_.size(), &path);
    for (const std::string& step : path_) path.raw(step);
    added.path = path.take();
    added.value = value;
    return Status::ok();
  }

  Status add_refused(std::string reason) {
    BCP_RETURN_IF_ERROR(add(PickleValue()));
    values_.back().refusal = std::move(reason);
    return Status::ok();
  }

  static constexpr size_t kListBytes = 64;  // of an entry of lists_

  const Pickle& pickle_;
  const GlobalNames& names_;
  TorchBudget& budget_;
  std::string name_;
  std::vector<std::string> path_;
  std::unordered_map<uint32_t, bool> lists_;  // by cell: whether the list is entered
  std::vector<TorchValue> values_;
};

}  // namespace

Status TorchBudget::take(size_t bytes) {
  if (bytes > left_) {
    return Status::make(Code::kCorrupt,
                        "the pickle has the same values in so many places that they take far more "
                        "memory than the pickle");
  }
  left_ -= bytes;
  return Status::ok();
}

base::Result<std::vector<TorchValue>> flatten_torch_value(const Pickle& pickle, const GlobalNames& names,
                                                          TorchBudget* budget, std::string_view root) {
  return Flattener(pickle, names, budget).run(root);
}

}  // namespace bytecheckpoint::format
