// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include "csrc/base/status.h"
#include "csrc/format/archive/archive_reader.h"
#include "csrc/format/manifest/manifest.h"

namespace bytecheckpoint::format {

/// How many bytes of a file `has_torch_magic` needs.
inline constexpr int64_t kTorchMagicBytes = 16;

/// Whether a file that begins with `first` may be one of torch.save, of any version.
bool has_torch_magic(std::string_view first);

/// Makes a manifest of a file that `torch.save` wrote of a state dict, as another writer's checkpoint. The zip
/// directory, the pickle and the headers of storages are read; elements are not. Nothing of the pickle is run.
///
/// Values have the names that DCP's `flatten_state_dict` gives them, and planner data that lead back. A tensor is one
/// chunk of kind kTensor, or kStrided if its elements are not row-major. Several tensors may lie in one storage. An
/// object is a kInline record. A value that cannot be read, such as a sparse tensor or a tensor within a tuple, is a
/// kRefused record, so that it does not keep others from being read.
///
/// \param file_bytes  Length of the file, which must begin as `has_torch_magic` says.
/// \param root        What the names begin with, before a dot. The value of the file may then be anything, and has this
///                    name if it is no dict. Empty: the names are those in the dict.
/// \param folder      Receives the folder in the archive that all its entries are in: torch takes the name of the file
/// without its ending, and `archive` where it has none. Null: nobody asks.
/// \returns a manifest with one file, without a name. kUnsupported for a file from before torch 1.6, a TorchScript
/// program, compressed or big-endian storages, and a value that is no dict. kCorrupt for a damaged file: also for a
/// storage that is missing or there twice, for overlapping storages, and for a tensor that reaches out of its storage.
/// Takes at most 1024 times the memory of the pickle and the directory, and 4 MiB.
base::Result<Manifest> read_torch_file(int64_t file_bytes, const ReadBytes& read, std::string_view root = {},
                                       std::string* folder = nullptr);

}  // namespace bytecheckpoint::format
