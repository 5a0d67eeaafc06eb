// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "csrc/base/bytes.h"

// The names in a checkpoint directory, except those of data files, which `format/data_file.h` defines. All functions
// are pure.

namespace bytecheckpoint::engine {

/// For whom a save commits: empty for all ranks together; a rank if that rank saves on its own
/// (`use_collectives=False`).
using Scope = std::optional<uint32_t>;

/// Whether saves of these scopes conflict. Those of two single ranks do not, because their files have different names.
inline bool concerns(Scope a, Scope b) {
  return !a.has_value() || !b.has_value() || *a == *b;
}

inline constexpr std::string_view kMetadataName = ".metadata";

/// Returns the name of the commit mark: `.metadata`, or `__{rank}.metadata`.
std::string mark_name(Scope scope);
/// Whether `name` is the commit mark of one rank. \param rank  Receives that rank; may be null.
bool is_rank_metadata_name(std::string_view name, uint32_t* rank = nullptr);

/// Returns `.metadata.{32 hex digits}.tmp`, or `__{rank}.metadata.{32 hex digits}.tmp`.
std::string tmp_name(const base::Id& save_id, Scope scope = {});
/// Whether `name` is one that `tmp_name` returns. \param scope  Receives the scope of its save; may be null.
bool is_tmp_name(std::string_view name, Scope* scope = nullptr);

/// Whether `name` is a data file of ours that a save of `scope` may write, and so may sweep.
bool is_data_file_of(Scope scope, std::string_view name);
/// Whether `name` is a data file of ours, a data file of stock DCP (`__{rank}_{n}.distcp`), or the tmp of stock DCP's
/// `.metadata`.
bool is_data_file_of_any_writer(std::string_view name);

}  // namespace bytecheckpoint::engine
