// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch_archive.h"

#include <algorithm>
#include <string>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/format/manifest.h"
#include "csrc/format/pickle_entry.h"
#include "csrc/format/pickle_reader.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;
using Kind = PickleValue::Kind;

/// One tensor's takes about 200 bytes.
constexpr int64_t kMaxPickleBytes = 64 << 10;

/// Globals that a plain tensor is made of. All others are let in as kOther: they make the archive opaque.
enum Global : uint32_t {
  kOther,
  kRebuildTensorV2,
  kRebuildTensorV3,
  kRebuildParameter,
  kUntypedStorage,
  kOrderedDict,
  kFirstTypedStorage = 256,  // and the code of the dtype
  kFirstDType = 512,         // and the code of the dtype
};

uint32_t find_global(std::string_view module, std::string_view name) {
  if (module == "torch._utils") {
    if (name == "_rebuild_tensor_v2") return kRebuildTensorV2;
    if (name == "_rebuild_tensor_v3") return kRebuildTensorV3;
    if (name == "_rebuild_parameter") return kRebuildParameter;
  } else if (module == "torch.storage") {
    if (name == "UntypedStorage") return kUntypedStorage;
  } else if (module == "collections") {
    if (name == "OrderedDict") return kOrderedDict;
  } else if (module == "torch") {
    for (uint8_t code = 1; code <= tensor::kLastPlainDType; ++code) {
      const tensor::DTypeInfo& info = *tensor::find_plain_dtype(code);
      if (name == info.name) return kFirstDType + code;
      if (info.typed_storage != nullptr && name == info.typed_storage) return kFirstTypedStorage + code;
    }
  }
  return kOther;
}

const tensor::DTypeInfo* dtype_of(const PickleValue& value, Global first) {
  if (!value.is(Kind::kGlobal) || value.global() <= first) return nullptr;
  const uint32_t code = value.global() - first;
  return code <= tensor::kLastPlainDType ? tensor::find_plain_dtype(static_cast<uint8_t>(code)) : nullptr;
}

bool is_complex(tensor::DType dtype) {
  return dtype == tensor::DType::kComplex32 || dtype == tensor::DType::kComplex64 ||
         dtype == tensor::DType::kComplex128;
}

/// What the pickle says of a plain tensor.
struct PickledTensor {
  const tensor::DTypeInfo* dtype = nullptr;
  std::string_view storage_key;
  int64_t storage_elements = 0;  // of its type; of an untyped storage bytes
  bool is_typed = false;
  int64_t first_element = 0;
  tensor::Dims sizes;
  tensor::Dims strides;
  bool is_conj = false;
  bool is_neg = false;
};

/// Recognises a plain tensor. Every method gives false for what it does not know.
class TensorPickle {
 public:
  explicit TensorPickle(const Pickle& pickle) : pickle_(pickle) {}

  bool read(PickledTensor* out) const {
    PickleValue value = pickle_.root();
    if (const auto parameter = call(value, kRebuildParameter)) {
      const PickleSpan args = pickle_.children(parameter->args);
      if (args.size() != 3 || !is_empty_ordered_dict(args[2])) return false;
      value = args[0];
    }
    const auto v2 = call(value, kRebuildTensorV2), v3 = call(value, kRebuildTensorV3);
    if (!v2.has_value() && !v3.has_value()) return false;
    const PickleSpan args = pickle_.children(v2.has_value() ? v2->args : v3->args);
    const size_t required = v2.has_value() ? 6 : 7;
    if (args.size() != required && args.size() != required + 1) return false;
    out->is_typed = v2.has_value();
    if (!out->is_typed) out->dtype = dtype_of(args[6], kFirstDType);
    return read_storage(args[0], out) && out->dtype != nullptr && read_int(args[1], &out->first_element) &&
           read_ints(args[2], &out->sizes) && read_ints(args[3], &out->strides) && args[4].is(Kind::kBool) &&
           is_empty_ordered_dict(args[5]) && (args.size() == required || read_flags(args[required], out));
  }

 private:
  /// A call whose result was left as it is.
  std::optional<PickleObject> call(const PickleValue& value, Global global) const {
    std::optional<PickleObject> object = pickle_.object(value, Kind::kCall, global);
    if (object.has_value() && !object->state.is(Kind::kHole)) object.reset();
    return object;
  }

  /// ('storage', type, key, location, elements)
  bool read_storage(const PickleValue& value, PickledTensor* out) const {
    if (!value.is(Kind::kPersistent)) return false;
    const PickleValue id = pickle_.object(value)->args;
    const PickleSpan parts = pickle_.children(id);
    if (!id.is(Kind::kTuple) || parts.size() != 5 || pickle_.text(parts[0]) != "storage") return false;
    if (out->is_typed) {
      out->dtype = dtype_of(parts[1], kFirstTypedStorage);
    } else if (!parts[1].is(Kind::kGlobal) || parts[1].global() != kUntypedStorage) {
      return false;
    }
    out->storage_key = pickle_.text(parts[2]);
    return parts[2].is(Kind::kString) && parts[3].is(Kind::kString) && read_int(parts[4], &out->storage_elements);
  }

  bool read_int(const PickleValue& value, int64_t* out) const {
    if (!value.is(Kind::kInt)) return false;
    *out = pickle_.integer(value);
    return true;
  }

  bool read_ints(const PickleValue& value, tensor::Dims* out) const {
    const PickleSpan numbers = pickle_.children(value);
    if (!value.is(Kind::kTuple) || numbers.size() > kMaxDims) return false;
    out->resize(numbers.size());
    for (size_t d = 0; d < numbers.size(); ++d) {
      if (!read_int(numbers[d], &(*out)[d])) return false;
    }
    return true;
  }

  bool is_empty_ordered_dict(const PickleValue& value) const {
    const auto dict = call(value, kOrderedDict);
    return dict.has_value() && pickle_.children(dict->args).size() == 0;
  }

  /// None, or a dict of what is set.
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

/// Elements up to the last one that a view of a storage reaches; 0 without elements. False on numbers that cannot be.
bool reach_of(const PickledTensor& pickled, int64_t* reach) {
  const auto is_negative = [](int64_t value) { return value < 0; };
  int64_t numel;
  if (pickled.sizes.size() != pickled.strides.size() || !tensor::checked_numel(pickled.sizes, &numel) ||
      std::any_of(pickled.strides.begin(), pickled.strides.end(), is_negative) || pickled.first_element < 0) {
    return false;
  }
  *reach = 0;
  if (numel == 0) return true;
  int64_t last = pickled.first_element, step;
  for (size_t d = 0; d < pickled.sizes.size(); ++d) {
    if (!base::checked_mul(pickled.sizes[d] - 1, pickled.strides[d], &step) || !base::checked_add(last, step, &last)) {
      return false;
    }
  }
  return base::checked_add(last, 1, reach);
}

class TensorArchive {
 public:
  TensorArchive(int64_t bytes, const ReadBytes& read) : archive_(bytes, read) {}

  base::Result<std::optional<ArchivedTensor>> read() {
    const std::optional<ArchivedTensor> opaque;
    BCP_ASSIGN_OR_RETURN(std::optional<PickleEntry> entry, read_pickle_entry(&archive_, kMaxPickleBytes));
    if (!entry.has_value()) return opaque;
    entry_ = std::move(*entry);
    const PickleRules rules{
        [](std::string_view m, std::string_view n) { return std::make_optional(find_global(m, n)); }, true};
    const base::Result<Pickle> read = read_pickle(entry_.pickle, rules);
    if (!read.is_ok()) {
      if (read.status().code() == Code::kUnsupported) return opaque;
      return read.status().with_context("archive: data.pkl");
    }
    if (read.value().end() != entry_.pickle.size()) return corrupt_archive("data.pkl: bytes behind the pickle");
    PickledTensor pickled;
    if (!TensorPickle(read.value()).read(&pickled)) return opaque;
    return locate(std::move(pickled));
  }

 private:
  base::Result<std::optional<ArchivedTensor>> locate(PickledTensor pickled) {
    const int64_t itemsize = pickled.dtype->itemsize_bytes;
    BCP_ASSIGN_OR_RETURN(const ZipEntry* storage, entry_.find(text("data/", pickled.storage_key)));
    if (storage == nullptr) return corrupt_archive(text("no storage '", pickled.storage_key, "'"));
    if (!storage->is_plain) return std::optional<ArchivedTensor>();
    int64_t storage_bytes, reach, reach_bytes;
    if (!base::checked_mul(pickled.storage_elements, pickled.is_typed ? itemsize : 1, &storage_bytes) ||
        storage_bytes != storage->bytes) {
      return corrupt_archive(text("storage '", pickled.storage_key, "' has ", storage->bytes,
                                  " bytes, the pickle wants ", pickled.storage_elements,
                                  pickled.is_typed ? " elements of " : " bytes for ", pickled.dtype->name));
    }
    if (!reach_of(pickled, &reach) || !base::checked_mul(reach, itemsize, &reach_bytes) ||
        reach_bytes > storage_bytes) {
      return corrupt_archive(text("tensor of ", tensor::to_text(pickled.sizes), ", strides ",
                                  tensor::to_text(pickled.strides), ", from element ", pickled.first_element,
                                  " on, outside its storage of ", storage_bytes, " bytes of ", pickled.dtype->name));
    }
    ArchivedTensor out;
    BCP_ASSIGN_OR_RETURN(out.storage_offset, content_offset(*storage, entry_.directory, &archive_));
    out.dtype = pickled.dtype->dtype;
    out.storage_bytes = storage_bytes;
    out.data_offset = out.storage_offset + (reach == 0 ? 0 : pickled.first_element * itemsize);
    if (entry_.has_crcs) out.storage_crc = storage->crc;
    out.sizes = std::move(pickled.sizes);
    out.strides = std::move(pickled.strides);
    out.is_conj = pickled.is_conj;
    out.is_neg = pickled.is_neg;
    return std::make_optional(std::move(out));
  }

  ArchiveReader archive_;
  PickleEntry entry_;
};

}  // namespace

base::Result<std::optional<ArchivedTensor>> read_tensor_archive(int64_t archive_bytes, const ReadBytes& read) {
  if (archive_bytes < 0) return corrupt_archive(text(archive_bytes, " bytes"));
  return TensorArchive(archive_bytes, read).read();
}

}  // namespace bytecheckpoint::format
