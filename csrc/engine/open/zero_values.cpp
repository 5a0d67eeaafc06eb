// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/zero_values.h"

#include <algorithm>

#include "csrc/format/pickle/pickle_copy.h"
#include "csrc/format/pickle/pickle_reader.h"
#include "csrc/format/torch/pickled_attributes.h"

namespace bytecheckpoint::engine {
namespace {

using format::PickleValue;

/// Takes `text` off the front of `*from`. \returns whether it was there.
bool take(std::string_view text, std::string_view* from) {
  if (from->substr(0, text.size()) != text) return false;
  from->remove_prefix(text.size());
  return true;
}

bool take_number(std::string_view* from, int* out) {
  constexpr size_t kMostDigits = 7;
  size_t digits = 0;
  *out = 0;
  while (digits < from->size() && (*from)[digits] >= '0' && (*from)[digits] <= '9' && digits <= kMostDigits) {
    *out = 10 * *out + ((*from)[digits++] - '0');
  }
  from->remove_prefix(digits);
  return digits > 0 && digits <= kMostDigits;
}

/// Calls `use(pickle)` with what is read. \returns what it returns; false if it cannot be read.
template <class Use>
bool with_pickle(std::string_view bytes, const Use& use) {
  format::GlobalNames names;
  const format::PickleRules rules = names.rules();
  const auto read = format::read_pickle(bytes, rules);
  return read.is_ok() && use(read.value());
}

}  // namespace

std::optional<ZeroFile> parse_zero_file(std::string_view name) {
  ZeroFile file;
  const bool is_cast = take("bf16_", &name) || take("fp16_", &name);
  const bool is_of_rank = take("zero_pp_rank_", &name) && take_number(&name, &file.rank) && take("_", &name);
  if (!take("mp_rank_", &name) || !take_number(&name, &file.model_rank)) return std::nullopt;
  file.is_of_optimizer = name == "_optim_states.pt";
  const bool is_known = file.is_of_optimizer ? is_of_rank : name == "_model_states.pt" && !is_cast;
  return is_known ? std::make_optional(file) : std::nullopt;
}

bool is_of_layer_or_expert(std::string_view name) {
  constexpr std::string_view kModel = "model_states.pt", kOptimizer = "_optim_states.pt";
  const auto ends_with = [&](std::string_view end) {
    return name.size() > end.size() && name.substr(name.size() - end.size()) == end;
  };
  return (name.substr(0, 6) == "layer_" && ends_with(kModel)) ||
         (name.find("expp_rank_") != std::string_view::npos && ends_with(kOptimizer));
}

bool begins_with_one(std::string_view name, std::initializer_list<std::string_view> begins) {
  return std::any_of(begins.begin(), begins.end(),
                     [&](std::string_view begin) { return name.substr(0, begin.size()) == begin; });
}

bool read_size(std::string_view bytes, tensor::Dims* out) {
  return with_pickle(
      bytes, [&](const format::Pickle& pickle) { return format::read_pickled_ints(pickle, pickle.root(), out); });
}

bool read_fragment(std::string_view bytes, Fragment* out) {
  return with_pickle(bytes, [&](const format::Pickle& pickle) {
    const PickleValue numel = format::attribute_of(pickle, pickle.root(), "numel");
    const PickleValue start = format::attribute_of(pickle, pickle.root(), "start");
    return format::read_pickled_int(pickle, numel, &out->numel) && format::read_pickled_int(pickle, start, &out->start);
  });
}

bool read_counts(std::string_view bytes, std::vector<int64_t>* out) {
  return with_pickle(bytes, [&](const format::Pickle& pickle) {
    const auto add = [&](const PickleValue& value) {
      return format::read_pickled_int(pickle, value, &out->emplace_back());
    };
    if (!pickle.root().is(PickleValue::Kind::kList)) return add(pickle.root());
    for (const PickleValue& value : pickle.children(pickle.root())) {
      if (!add(value)) return false;
    }
    return true;
  });
}

bool read_text(std::string_view bytes, std::string* out) {
  return with_pickle(bytes, [&](const format::Pickle& pickle) {
    if (!pickle.root().is(PickleValue::Kind::kString)) return false;
    *out = std::string(pickle.text(pickle.root()));
    return true;
  });
}

}  // namespace bytecheckpoint::engine
