// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/zero_values.h"

#include "csrc/format/manifest/manifest.h"
#include "csrc/format/pickle/pickle_copy.h"
#include "csrc/format/pickle/pickle_reader.h"
#include "csrc/format/pickle/standard_globals.h"

namespace bytecheckpoint::engine {
namespace {

using format::PickleValue;
using Kind = PickleValue::Kind;

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

bool read_int(const format::Pickle& pickle, const PickleValue& value, int64_t* out) {
  if (!value.is(Kind::kInt)) return false;
  *out = pickle.integer(value);
  return true;
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

bool read_size(std::string_view bytes, tensor::Dims* out) {
  return with_pickle(bytes, [&](const format::Pickle& pickle) {
    const auto size =
        pickle.object(pickle.root(), Kind::kCall, static_cast<uint32_t>(format::StandardGlobal::kTorchSize));
    const format::PickleSpan args = size.has_value() ? pickle.children(size->args) : format::PickleSpan();
    if (args.size() != 1 || !args[0].is(Kind::kTuple)) return false;
    const format::PickleSpan numbers = pickle.children(args[0]);
    if (numbers.size() > format::kMaxDims) return false;
    out->clear();
    for (const PickleValue& number : numbers) {
      int64_t read = 0;
      if (!read_int(pickle, number, &read)) return false;
      out->push_back(read);
    }
    return true;
  });
}

bool read_fragment(std::string_view bytes, Fragment* out) {
  return with_pickle(bytes, [&](const format::Pickle& pickle) {
    const auto object = pickle.object(pickle.root());
    if (!object.has_value() || pickle.root().is(Kind::kPersistent)) return false;
    const format::PickleSpan args = pickle.children(object->args);
    if (args.size() == 2) return read_int(pickle, args[0], &out->numel) && read_int(pickle, args[1], &out->start);
    bool has_numel = false, has_start = false;
    const format::PickleSpan state = pickle.children(object->state);
    if (!object->state.is(Kind::kDict)) return false;
    for (auto entry = state.begin(); entry != state.end(); ++entry) {
      const std::string_view name = pickle.text(*entry);
      ++entry;
      if (name == "numel") has_numel = read_int(pickle, *entry, &out->numel);
      if (name == "start") has_start = read_int(pickle, *entry, &out->start);
    }
    return has_numel && has_start;
  });
}

bool read_text(std::string_view bytes, std::string* out) {
  return with_pickle(bytes, [&](const format::Pickle& pickle) {
    if (!pickle.root().is(Kind::kString)) return false;
    *out = std::string(pickle.text(pickle.root()));
    return true;
  });
}

}  // namespace bytecheckpoint::engine
