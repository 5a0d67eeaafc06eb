// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/torch_archive.h"

#include <algorithm>
#include <string>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/format/pickle/pickle_reader.h"
#include "csrc/format/pickle/standard_globals.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::text;

/// The pickle of one tensor takes about 200 bytes.
constexpr int64_t kMaxTensorPickleBytes = 64 << 10;

/// Stands for all globals that are not known. A pickle with one is left to torch.load.
constexpr uint32_t kOtherGlobal = ~uint32_t{0};

/// Computes how many elements of its storage a tensor reaches over: up to its last element, or 0 without elements.
/// \returns false for impossible numbers.
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

}  // namespace

base::Result<ArchivedTensor> place_tensor(PickledTensor pickled, const ZipEntry& storage, int64_t storage_offset) {
  const int64_t itemsize = pickled.dtype->itemsize_bytes;
  int64_t storage_bytes, reach, reach_bytes;
  if (!base::checked_mul(pickled.storage_elements, pickled.is_typed ? itemsize : 1, &storage_bytes) ||
      storage_bytes != storage.bytes) {
    return corrupt_archive(text("storage '", pickled.storage_key, "' has ", storage.bytes,
                                " bytes, but the pickle says ", pickled.storage_elements,
                                pickled.is_typed ? " elements of " : " bytes for ", pickled.dtype->name));
  }
  if (!reach_of(pickled, &reach) || !base::checked_mul(reach, itemsize, &reach_bytes) || reach_bytes > storage_bytes) {
    return corrupt_archive(text("a tensor of ", tensor::to_text(pickled.sizes), ", strides ",
                                tensor::to_text(pickled.strides), ", from element ", pickled.first_element,
                                " on, is outside its storage of ", storage_bytes, " bytes of ", pickled.dtype->name));
  }
  ArchivedTensor out;
  out.storage_offset = storage_offset;
  out.dtype = pickled.dtype->dtype;
  out.storage_bytes = storage_bytes;
  out.data_offset = out.storage_offset + (reach == 0 ? 0 : pickled.first_element * itemsize);
  out.storage_crc = storage.crc;
  out.sizes = std::move(pickled.sizes);
  out.strides = std::move(pickled.strides);
  out.is_conj = pickled.is_conj;
  out.is_neg = pickled.is_neg;
  return out;
}

base::Result<std::optional<ArchivedTensor>> locate_tensor(PickledTensor pickled, const PickleEntry& entry,
                                                          ArchiveReader* archive) {
  BCP_ASSIGN_OR_RETURN(const ZipEntry* storage, entry.find(text("data/", pickled.storage_key)));
  if (storage == nullptr) return corrupt_archive(text("there is no storage '", pickled.storage_key, "'"));
  if (!storage->is_plain) return std::optional<ArchivedTensor>();
  BCP_ASSIGN_OR_RETURN(const int64_t offset, content_offset(*storage, entry.directory, archive));
  BCP_ASSIGN_OR_RETURN(ArchivedTensor out, place_tensor(std::move(pickled), *storage, offset));
  if (!entry.has_crcs) out.storage_crc.reset();
  return std::make_optional(std::move(out));
}

base::Result<std::optional<ArchivedTensor>> read_tensor_archive(int64_t archive_bytes, const ReadBytes& read) {
  if (archive_bytes < 0) return corrupt_archive(text(archive_bytes, " bytes"));
  const std::optional<ArchivedTensor> opaque;
  ArchiveReader archive(archive_bytes, read);
  BCP_ASSIGN_OR_RETURN(const std::optional<PickleEntry> entry, read_pickle_entry(&archive, {kMaxTensorPickleBytes}));
  if (!entry.has_value()) return opaque;
  const PickleRules rules{[](std::string_view module, std::string_view name) {
                            return std::make_optional(find_standard_global(module, name).value_or(kOtherGlobal));
                          },
                          true};
  const base::Result<Pickle> pickle = read_pickle(entry->pickle, rules);
  if (!pickle.is_ok()) {
    if (pickle.status().code() == Code::kUnsupported) return opaque;
    return pickle.status().with_context("archive: data.pkl");
  }
  if (pickle.value().end() != entry->pickle.size())
    return corrupt_archive("data.pkl: there are bytes after the pickle");
  std::optional<PickledTensor> pickled = read_pickled_tensor(pickle.value(), pickle.value().root());
  if (!pickled.has_value()) return opaque;
  return locate_tensor(std::move(*pickled), *entry, &archive);
}

}  // namespace bytecheckpoint::format
