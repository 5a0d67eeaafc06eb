// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/planner/rank_sets.h"

namespace bytecheckpoint::planner {

/// What one rank holds of something that other ranks may hold under the same key: an object, a plain tensor, or a box
/// of a tensor whose ranks are not all in one mesh. Ranks send it beside their inventories, for `compare_copies`.
struct HeldCopy {
  /// Nothing was looked at, so this copy equals any other.
  static constexpr uint32_t kNothing = 0;
  /// `checksum` is that of all its bytes. Any larger number names the part that was looked at.
  static constexpr uint32_t kWhole = 1;

  uint64_t key = 0;         // from `key_of_copy`
  uint32_t mesh = 0;        // names the ranks that torch keeps equal, this one among them; 0: torch keeps none equal
  uint32_t how = kNothing;  // which bytes `checksum` is of: only checksums of the same bytes can be compared
  uint32_t checksum = 0;
};

/// The copies of several ranks. Equal ones stand once, with all their ranks.
struct Copies {
  struct Variant {
    HeldCopy copy;
    RankSets::Id ranks = 0;
  };

  std::vector<Variant> variants;  // by key; those of a key by their lowest rank
  RankSets rank_sets;
};

/// Returns the number by which ranks find one another's copies of a box. It depends on nothing but the arguments, and
/// is the same in all processes of one build.
/// \param box  Offsets, then sizes: 2 * num_dims numbers.
uint64_t key_of_copy(std::string_view fqn, const int64_t* box, size_t num_dims);

/// Brings the copies of one rank into the order in which they are sent and `hashes_of_groups` counts them.
void sort_copies(std::vector<HeldCopy>* copies);

/// Encodes the copies of one rank, which names itself rank 0. \param copies  Sorted.
std::string encode_copies(const std::vector<HeldCopy>& copies);
/// Encodes the copies of any ranks.
std::string encode_copies(const Copies& copies);

/// Puts an encoded inventory and the encoded copies of the same ranks into one message. Without copies it is the
/// inventory.
std::string join_message(std::string_view inventory, std::string_view copies);
/// Returns the inventory and the copies of a message. A damaged one is returned as an inventory, which nobody can read.
std::pair<std::string_view, std::string_view> split_message(std::string_view message);

/// Copies that were encoded, maybe by another process.
struct EncodedCopies {
  std::string_view bytes;
  std::optional<uint32_t> as_rank = std::nullopt;  // if given, they are of this rank, whatever rank they name
};

/// Decodes copies in the order in which they were encoded. \returns kCorrupt for damage.
base::Result<Copies> decode_copies(const EncodedCopies& encoded);

/// Joins the copies of different ranks. Associative. \returns kCorrupt for damage. O(n log n).
base::Result<Copies> merge_copies(const std::vector<EncodedCopies>& encoded);

/// Returns a number for each group of copies that was found equal on several ranks: the number of the group (u32), then
/// a hash of what this rank holds of it (u64). While the ranks of a group have equal hashes, all its copies are equal.
///
/// \param copies  Of this rank, sorted.
/// \param groups  From `compare_copies`, for this rank and an inventory like that of now.
/// \returns kCorrupt if `groups` is damaged, or of another number of copies.
base::Result<std::string> hashes_of_groups(const std::vector<HeldCopy>& copies, std::string_view groups);

}  // namespace bytecheckpoint::planner
