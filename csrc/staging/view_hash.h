// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "csrc/base/content_hash.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::staging {

/// Of a longer tensor, so many bytes are its sample.
inline constexpr int64_t kHashSampleBytes = 64 << 10;

/// Returns the hash of the row-major elements of a tensor in host memory.
base::ContentHash hash_view(const tensor::StridedView& view);

/// Returns the hash of the first kHashSampleBytes of the same: where it differs, so does the whole.
base::ContentHash hash_sample(const tensor::StridedView& view);

}  // namespace bytecheckpoint::staging
