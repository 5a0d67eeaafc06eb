// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/pickled_attributes.h"

#include "csrc/format/manifest/manifest.h"
#include "csrc/format/pickle/standard_globals.h"

namespace bytecheckpoint::format {
namespace {

using Kind = PickleValue::Kind;

/// A search stays cheap even if the pickle shares one object among many places.
constexpr size_t kMostAttributes = 64;

/// Returns the dict of a state, behind which the values of slots may stand in a tuple; a hole if there is none.
PickleValue dict_of_state(const Pickle& pickle, const PickleValue& state) {
  if (state.is(Kind::kDict)) return state;
  const PickleSpan both = pickle.children(state);
  if (!state.is(Kind::kTuple) || both.size() != 2) return PickleValue();
  if (both[1].is(Kind::kDict)) return both[1];
  return both[0].is(Kind::kDict) ? both[0] : PickleValue();
}

}  // namespace

PickleValue attribute_of(const Pickle& pickle, const PickleValue& value, std::string_view name) {
  const std::optional<PickleObject> object = pickle.object(value);
  const PickleValue dict = dict_of_state(pickle, object.has_value() ? object->state : value);
  PickleValue found;
  const PickleSpan entries = pickle.children(dict);
  if (entries.size() > 2 * kMostAttributes) return found;
  for (auto entry = entries.begin(); entry != entries.end(); ++entry) {
    const PickleValue key = *entry;
    ++entry;
    if (key.is(Kind::kString) && pickle.text(key) == name) found = *entry;
  }
  return found;
}

bool read_pickled_int(const Pickle& pickle, const PickleValue& value, int64_t* out) {
  if (!value.is(Kind::kInt)) return false;
  *out = pickle.integer(value);
  return true;
}

bool read_pickled_ints(const Pickle& pickle, const PickleValue& value, tensor::Dims* out) {
  PickleValue listed = value;
  const auto size = pickle.object(value, Kind::kCall, static_cast<uint32_t>(StandardGlobal::kTorchSize));
  if (size.has_value()) {
    const PickleSpan args = pickle.children(size->args);
    if (args.size() != 1) return false;
    listed = args[0];
  }
  const PickleSpan numbers = pickle.children(listed);
  if ((!listed.is(Kind::kTuple) && !listed.is(Kind::kList)) || numbers.size() > kMaxDims) return false;
  out->clear();
  for (const PickleValue& number : numbers) {
    int64_t read = 0;
    if (!read_pickled_int(pickle, number, &read)) return false;
    out->push_back(read);
  }
  return true;
}

}  // namespace bytecheckpoint::format
