// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

#include "csrc/format/manifest/manifest_rows.h"

namespace bytecheckpoint::format {

/// Encodes one manifest. It knows the length before it writes, because manifests have up to hundreds of megabytes and
/// are written right into the buffer that becomes the file.
class ManifestEncoder {
 public:
  /// \param manifest  Its items are sorted and unique. Must outlive the encoder and not change meanwhile.
  explicit ManifestEncoder(const Manifest& manifest);

  size_t num_bytes() const { return num_bytes_; }
  /// Appends exactly num_bytes() bytes.
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
  uint64_t names_bytes_ = 0;  // length of all item names; the file names follow them
};

}  // namespace bytecheckpoint::format
