// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/dcp/compare_metadata.h"

#include "csrc/format/dcp/foreign_metadata.h"

namespace bytecheckpoint::format {
namespace {

using base::text;

/// Compares item `a` of the pickle with the same item `b` of the manifest. Returns the first difference, or an empty
/// text.
std::string difference_of(const Manifest& theirs, const Item& a, const Manifest& ours, const Item& b) {
  if (a.fqn != b.fqn) return text("key '", a.fqn, "' where the manifest has '", b.fqn, "'");
  const auto differ = [&](const char* what) { return text("'", b.fqn, "': ", what, " differs from the manifest's"); };
  if (a.is_tensor != b.is_tensor) return differ("kind");
  if (a.ordinal != b.ordinal) return differ("position in the state dict");
  if (a.tensor.dtype != b.tensor.dtype) return differ("dtype");
  if (a.tensor.sizes != b.tensor.sizes) return differ("shape");
  if (a.tensor.requires_grad != b.tensor.requires_grad || a.tensor.pin_memory != b.tensor.pin_memory ||
      a.tensor.memory_format != b.tensor.memory_format) {
    return differ("a property");
  }
  if (a.chunks.size() != b.chunks.size()) return differ("number of chunks");
  for (size_t c = 0; c < a.chunks.size(); ++c) {
    const Record &x = a.chunks[c].record, &y = b.chunks[c].record;
    if (!(a.chunks[c].box == b.chunks[c].box)) return differ("box of a chunk");
    if (x.kind == RecordKind::kAbsent || theirs.files[x.file].name != ours.files[y.file].name || x.offset != y.offset ||
        x.bytes != y.bytes) {
      return differ("place of a chunk");
    }
  }
  return {};
}

}  // namespace

std::string compare_metadata(std::string_view pickle, const Manifest& manifest) {
  const base::Result<Manifest> read = read_foreign_metadata(pickle);
  if (!read.is_ok()) return text("the pickle cannot be read: ", read.status().message());
  const Manifest& theirs = read.value();
  if (theirs.items.size() != manifest.items.size()) {
    return text("the pickle has ", theirs.items.size(), " keys, the manifest ", manifest.items.size());
  }
  for (size_t i = 0; i < theirs.items.size(); ++i) {
    std::string difference = difference_of(theirs, theirs.items[i], manifest, manifest.items[i]);
    if (!difference.empty()) return text("in the pickle, ", difference);
  }
  if (!(theirs.planner_data == manifest.planner_data)) return "planner data of pickle and manifest differ";
  return {};
}

}  // namespace bytecheckpoint::format
