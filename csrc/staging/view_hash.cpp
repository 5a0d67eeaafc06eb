// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/view_hash.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "csrc/staging/merge.h"

namespace bytecheckpoint::staging {
namespace {

base::ContentHash hash_first(const tensor::StridedView& view, int64_t most_bytes) {
  const tensor::BoxRuns runs(view);
  const int64_t bytes = std::min(runs.end(), most_bytes);
  const bool is_in_order = tensor::is_row_major(view);
  std::vector<uint8_t> gathered(is_in_order ? 0 : static_cast<size_t>(std::min(bytes, base::kHashedBytes)));
  std::vector<base::ContentHash> stretches;
  for (int64_t begin = 0; begin < bytes; begin += base::kHashedBytes) {
    const int64_t end = std::min(begin + base::kHashedBytes, bytes);
    if (!is_in_order) gather_window(runs, view.data, begin, end, gathered.data());
    const uint8_t* const from = is_in_order ? view.data + begin : gathered.data();
    stretches.push_back(base::hash_stretch(from, static_cast<size_t>(end - begin)));
  }
  return base::join_stretches(stretches.data(), stretches.size());
}

}  // namespace

base::ContentHash hash_view(const tensor::StridedView& view) {
  return hash_first(view, std::numeric_limits<int64_t>::max());
}

base::ContentHash hash_sample(const tensor::StridedView& view) {
  return hash_first(view, kHashSampleBytes);
}

}  // namespace bytecheckpoint::staging
