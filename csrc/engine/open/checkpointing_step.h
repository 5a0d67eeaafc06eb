// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/engine/open/model_files.h"

namespace bytecheckpoint::engine {

/// What makes a folder a step of torch_checkpointing. It writes this file if an item can be resharded.
inline constexpr std::string_view kStepMetadataName = "metadata.pkl";

/// Finds the files of a step of torch_checkpointing: `ITEM_R.pt` for each item and rank, each with the item as root.
///
/// `metadata.pkl` says which ranks saved, and which of them have parts of the items that can be resharded; their files
/// must be there. Of other items it says nothing, so of these the files of these ranks are taken that are there. Items
/// in other formats are left out, and so are files of other ranks: of a save that was of more, or of a user.
///
/// \param listed  The names in `directory`, with `metadata.pkl`.
/// \returns the files by item, then in the order of ranks. kNotFound if there are none. kCorrupt, naming one, if some
/// are missing, and for metadata that are damaged. kUnsupported for other metadata, and for an item that can be
/// resharded and is in files of other names. kStorage.
base::Result<ModelFiles> find_checkpointing_step(const std::string& directory, const std::vector<std::string>& listed);

}  // namespace bytecheckpoint::engine
