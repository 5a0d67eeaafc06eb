// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/engine/save/last_save.h"
#include "csrc/engine/save/tensor_to_write.h"

namespace bytecheckpoint::engine {

/// What a comparison with the last save has found.
struct Unchanged {
  std::vector<const SavedRecord*> records;  // of each tensor; null: it has changed, or is not known
  int64_t bytes_read = 0;                   // of tensors that were not staged: they are hashed where they are
};

/// Finds the tensors in host memory that have the same elements as in the last save. A tensor that somebody has staged
/// with hashes is not read again; of any other one the sample is compared first, so that one that has changed is hardly
/// read. Works in `num_threads` threads.
Unchanged find_unchanged(const std::vector<TensorToWrite>& tensors, const LastSave& last, int num_threads);

/// Which files of the last save are worth a link.
struct LinkRule {
  int most_links = 19;         // a file that was linked in so many saves is written anew: no damage is in all steps
  double least_in_use = 0.75;  // share of the bytes of a file that the new save must need
};

/// Returns the files of `last`, by index, that a save with these records should link.
std::vector<bool> files_to_link(const LastSave& last, const std::vector<const SavedRecord*>& records, LinkRule rule);

}  // namespace bytecheckpoint::engine
