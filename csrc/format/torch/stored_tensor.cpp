// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/stored_tensor.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace bytecheckpoint::format {
namespace {

using base::text;

/// Whether no two elements share memory, and whether those of the outer dims, in some order, enclose the inner ones.
bool are_apart(const tensor::Dims& sizes, const tensor::Dims& strides) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  int64_t reach = 1;  // elements from the first to the last of the inner dims; no overflow, because they are in a file
  for (const size_t d : order) {
    if (sizes[d] <= 1) continue;
    if (strides[d] < reach) return false;
    reach += (sizes[d] - 1) * strides[d];
  }
  return true;
}

bool is_row_major_in(const tensor::Dims& sizes, const tensor::Dims& strides) {
  const tensor::Dims wanted = tensor::row_major_strides(sizes);
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] > 1 && strides[d] != wanted[d]) return false;
  }
  return true;
}

}  // namespace

void set_text(RecordKind kind, std::string_view text, ForeignMeta* foreign, Record* record) {
  record->kind = kind;
  record->data_offset = static_cast<int64_t>(foreign->texts.size());
  record->data_bytes = static_cast<int64_t>(text.size());
  foreign->texts += text;
}

void set_stored_tensor(const ArchivedTensor& stored, const std::string& name, ForeignMeta* foreign, Record* record) {
  int64_t numel = 0;
  (void)tensor::checked_numel(stored.sizes, &numel);  // place_tensor has checked it
  const int64_t itemsize = tensor::find_dtype(stored.dtype)->itemsize_bytes;
  const bool is_plain = numel == 0 || is_row_major_in(stored.sizes, stored.strides);
  const bool is_changed = stored.is_conj || stored.is_neg;
  record->stored_dtype = stored.dtype;
  if (is_changed || (!is_plain && !are_apart(stored.sizes, stored.strides))) {
    set_text(RecordKind::kRefused,
             text("'", name, "' cannot be read without torch.load: ",
                  is_changed ? "its elements are the conjugates or negatives of what is stored"
                             : "elements of it share memory with one another"),
             foreign, record);
    return;
  }
  record->offset = record->data_offset = stored.data_offset;
  record->bytes = record->data_bytes = numel * itemsize;
  record->kind = RecordKind::kTensor;
  if (is_plain) return;
  int64_t reach = 1;
  for (size_t d = 0; d < stored.sizes.size(); ++d) reach += (stored.sizes[d] - 1) * stored.strides[d];
  record->kind = RecordKind::kStrided;
  record->bytes = reach * itemsize;
  record->data_bytes = static_cast<int64_t>(foreign->strides.size());
  foreign->strides.push_back(stored.strides);
}

}  // namespace bytecheckpoint::format
