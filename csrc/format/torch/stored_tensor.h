// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "csrc/format/manifest/manifest.h"
#include "csrc/format/torch/torch_archive.h"

namespace bytecheckpoint::format {

/// Makes the record of a tensor of another writer whose elements lie as `stored` says, at offsets of its file: kTensor
/// if they are row-major, kStrided if they are not, and kRefused, with the reason, if they cannot be read in part.
/// \param name  Of the tensor, for the reason.
void set_stored_tensor(const ArchivedTensor& stored, const std::string& name, ForeignMeta* foreign, Record* record);

/// Sets the text of a kInline or kRefused record.
void set_text(RecordKind kind, std::string_view text, ForeignMeta* foreign, Record* record);

}  // namespace bytecheckpoint::format
