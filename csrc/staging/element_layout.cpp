// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/element_layout.h"

#include <type_traits>

#include "csrc/staging/joined_dims.h"

namespace bytecheckpoint::staging {

static_assert(std::is_trivially_copyable_v<ElementLayout> && std::is_trivially_copyable_v<Tile>,
              "devices get them as bytes");

std::optional<ElementLayout> layout_of(const tensor::StridedView& view) {
  const JoinedDims joined = join_dims(view);
  ElementLayout layout{};
  layout.data = view.data;
  layout.unit_bytes = 1;
  if (joined.run_bytes == 0) return layout;

  // Finds the widest unit that divides every address. `&` with a power of two less one is also the remainder of
  // negative strides.
  uint64_t steps = reinterpret_cast<uintptr_t>(view.data);
  for (const int64_t stride : joined.strides_bytes) steps |= static_cast<uint64_t>(stride);
  // A contiguous tensor has a tail for the bytes left over. In a strided one, units must fill every run.
  if (!joined.sizes.empty()) steps |= static_cast<uint64_t>(joined.run_bytes);
  int64_t unit_bytes = 16;
  while ((steps & static_cast<uint64_t>(unit_bytes - 1)) != 0 || unit_bytes > joined.run_bytes) unit_bytes /= 2;

  layout.unit_bytes = static_cast<int32_t>(unit_bytes);
  layout.tail_bytes = static_cast<int32_t>(joined.run_bytes % unit_bytes);
  layout.num_units = 1;
  const auto push = [&](int64_t size, int64_t stride_bytes) {
    layout.sizes[layout.num_dims] = size;
    layout.strides_bytes[layout.num_dims++] = stride_bytes;
    layout.num_units *= size;
  };
  const int64_t units_of_run = joined.run_bytes / unit_bytes;
  if (joined.sizes.size() + (units_of_run > 1 ? 1 : 0) > ElementLayout::kMaxDims) return std::nullopt;
  for (size_t d = 0; d < joined.sizes.size(); ++d) push(joined.sizes[d], joined.strides_bytes[d]);
  if (units_of_run > 1) push(units_of_run, unit_bytes);
  return layout;
}

}  // namespace bytecheckpoint::staging
