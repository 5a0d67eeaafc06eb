// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/pickled_tensor.h"

#include "csrc/format/pickle/standard_globals.h"
#include "csrc/format/torch/pickled_attributes.h"

namespace bytecheckpoint::format {
namespace {

using Global = StandardGlobal;
using Kind = PickleValue::Kind;

const tensor::DTypeInfo* dtype_of(const PickleValue& value, Global first) {
  if (!value.is(Kind::kGlobal) || value.global() <= static_cast<uint32_t>(first)) return nullptr;
  const uint32_t code = value.global() - static_cast<uint32_t>(first);
  return code <= tensor::kLastDType ? tensor::find_plain_dtype(static_cast<uint8_t>(code)) : nullptr;
}

/// Recognises a plain tensor. Every method returns false for what it does not know.
class TensorPickle {
 public:
  explicit TensorPickle(const Pickle& pickle) : pickle_(pickle) {}

  bool read(PickleValue value, PickledTensor* out) const {
    const auto parameter = call(value, Global::kRebuildParameter);
    if (parameter.has_value()) {
      const PickleSpan args = pickle_.children(parameter->args);
      if (args.size() != 3 || !args[1].is(Kind::kBool) || !is_empty_ordered_dict(args[2])) return false;
      value = args[0];
    }
    const auto v2 = call(value, Global::kRebuildTensorV2), v3 = call(value, Global::kRebuildTensorV3);
    if (!v2.has_value() && !v3.has_value()) return false;
    if (!read_rebuilt(v2.has_value(), v2.has_value() ? v2->args : v3->args, out)) return false;
    out->is_parameter = parameter.has_value();
    if (out->is_parameter) out->requires_grad = pickle_.children(parameter->args)[1].is_true();
    return true;
  }

  /// Reads the arguments of the function that makes a tensor. \param is_v2  Which of them it is.
  bool read_rebuilt(bool is_v2, const PickleValue& arguments, PickledTensor* out) const {
    const PickleSpan args = pickle_.children(arguments);
    const size_t required = is_v2 ? 6 : 7;
    if (args.size() != required && args.size() != required + 1) return false;
    out->is_typed = is_v2;
    if (!out->is_typed) out->dtype = dtype_of(args[6], Global::kTorchDType);
    out->requires_grad = args[4].is_true();
    return read_storage(args[0], out) && out->dtype != nullptr && read_int(args[1], &out->first_element) &&
           read_ints(args[2], &out->sizes) && read_ints(args[3], &out->strides) && args[4].is(Kind::kBool) &&
           is_empty_ordered_dict(args[5]) && (args.size() == required || read_flags(args[required], out));
  }

 private:
  /// Recognises a call of `global` whose result was not changed afterwards.
  std::optional<PickleObject> call(const PickleValue& value, Global global) const {
    std::optional<PickleObject> object = pickle_.object(value, Kind::kCall, static_cast<uint32_t>(global));
    const bool is_changed = object.has_value() && !(object->state.is(Kind::kHole) && object->items.is(Kind::kHole));
    if (is_changed) object.reset();
    return object;
  }

  /// Reads the persistent id of a storage: ('storage', type, key, location, elements).
  bool read_storage(const PickleValue& value, PickledTensor* out) const {
    if (!value.is(Kind::kPersistent)) return false;
    const PickleValue id = pickle_.object(value)->args;
    const PickleSpan parts = pickle_.children(id);
    if (!id.is(Kind::kTuple) || parts.size() != 5 || pickle_.text(parts[0]) != "storage") return false;
    if (out->is_typed) {
      out->dtype = dtype_of(parts[1], Global::kTorchStorage);
    } else if (!parts[1].is(Kind::kGlobal) || parts[1].global() != static_cast<uint32_t>(Global::kUntypedStorage)) {
      return false;
    }
    out->storage_key = pickle_.text(parts[2]);
    out->location = pickle_.text(parts[3]);
    return parts[2].is(Kind::kString) && parts[3].is(Kind::kString) && read_int(parts[4], &out->storage_elements);
  }

  bool read_int(const PickleValue& value, int64_t* out) const { return read_pickled_int(pickle_, value, out); }

  bool read_ints(const PickleValue& value, tensor::Dims* out) const {
    return value.is(Kind::kTuple) && read_pickled_ints(pickle_, value, out);
  }

  bool is_empty_ordered_dict(const PickleValue& value) const {
    const auto dict = call(value, Global::kOrderedDict);
    return dict.has_value() && pickle_.children(dict->args).size() == 0;
  }

  /// Reads None, or a dict of the flags that are set.
  bool read_flags(const PickleValue& value, PickledTensor* out) const {
    if (value.is(Kind::kNone)) return true;
    const PickleSpan entries = pickle_.children(value);
    if (!value.is(Kind::kDict)) return false;
    for (auto entry = entries.begin(); entry != entries.end(); ++entry) {
      const std::string_view name = pickle_.text(*entry);
      ++entry;
      if (!(*entry).is(Kind::kBool) || (name != "conj" && name != "neg")) return false;
      (name == "conj" ? out->is_conj : out->is_neg) = (*entry).is_true();
    }
    return !out->is_conj || is_complex(out->dtype->dtype);
  }

  const Pickle& pickle_;
};

}  // namespace

std::optional<PickledTensor> read_pickled_tensor(const Pickle& pickle, const PickleValue& value) {
  PickledTensor tensor;
  if (!TensorPickle(pickle).read(value, &tensor)) return std::nullopt;
  return tensor;
}

std::optional<PickledTensor> read_pickled_tensor(const Pickle& pickle, const GlobalNames& names,
                                                 const PickleValue& value) {
  if (std::optional<PickledTensor> plain = read_pickled_tensor(pickle, value); plain.has_value()) return plain;
  if (!value.is(Kind::kCall)) return std::nullopt;
  const PickleObject object = *pickle.object(value);
  const PickleSpan args = pickle.children(object.args);
  const bool has_attributes =
      names.name_of(object.global) == GlobalNames::Name("torch._tensor", "_rebuild_from_type_v2") && args.size() == 4 &&
      args[0].is(Kind::kGlobal) && args[1].is(Kind::kGlobal) &&
      names.name_of(args[1].global()) == GlobalNames::Name("torch", "Tensor");
  if (!has_attributes) return std::nullopt;
  const auto function = static_cast<Global>(args[0].global());
  const bool is_v2 = function == Global::kRebuildTensorV2;
  PickledTensor tensor;
  if ((!is_v2 && function != Global::kRebuildTensorV3) || !TensorPickle(pickle).read_rebuilt(is_v2, args[2], &tensor)) {
    return std::nullopt;
  }
  return tensor;
}

}  // namespace bytecheckpoint::format
