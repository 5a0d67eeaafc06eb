// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

#include "csrc/format/manifest_rows.h"

namespace bytecheckpoint::format {

/// Serialises one manifest, whose length it knows beforehand: manifests have hundreds of megabytes, and are written
/// into the one buffer that becomes the file.
class ManifestEncoder {
 public:
  /// Items must be sorted and unique. The manifest is used until the encoder is gone.
  explicit ManifestEncoder(const Manifest& manifest);

  size_t num_bytes() const { return num_bytes_; }
  /// Appends exactly num_bytes().
  void append_to(std::string* out) const;

 private:
  void append_strings(base::ByteWriter* out) const;
  void append_items(base::ByteWriter* out) const;
  void append_dims(base::ByteWriter* out) const;
  void append_chunks(base::ByteWriter* out) const;
  void append_files(base::ByteWriter* out) const;

  const Manifest& manifest_;
  ManifestHead head_;
  size_t num_bytes_ = 0;
  uint64_t names_bytes_ = 0;  // of the items; those of the files follow
};

}  // namespace bytecheckpoint::format
