// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "csrc/base/bytes.h"

// Names in a checkpoint directory beside those of data files, which the format knows.

namespace bytecheckpoint::engine {

/// For whom a save commits: for all ranks together, or for one rank that saves on its own (`use_collectives=False`).
using Scope = std::optional<uint32_t>;

/// Do saves of these scopes get into each other's way? Single ranks do not: their files have different names.
inline bool concerns(Scope a, Scope b) {
  return !a.has_value() || !b.has_value() || *a == *b;
}

inline constexpr std::string_view kMetadataName = ".metadata";

/// The commit mark: `.metadata`, or `__{rank}.metadata`.
std::string mark_name(Scope scope);
/// Is `name` the commit mark of one rank? \param rank  Receives which; may be null.
bool is_rank_metadata_name(std::string_view name, uint32_t* rank = nullptr);

/// `.metadata.{32 hex digits}.tmp`, or `__{rank}.metadata.{32 hex digits}.tmp`.
std::string tmp_name(const base::Id& save_id, Scope scope = {});
/// Is `name` one that `tmp_name` makes? \param scope  Receives whose it is; may be null.
bool is_tmp_name(std::string_view name, Scope* scope = nullptr);

/// Is `name` a data file of our naming that a save of `scope` may write, and so sweep?
bool is_data_file_of(Scope scope, std::string_view name);
/// Is `name` a data file of ours, one that stock DCP writes (`__{rank}_{n}.distcp`), or a tmp of a mark of stock DCP?
bool is_data_file_of_any_writer(std::string_view name);

}  // namespace bytecheckpoint::engine
