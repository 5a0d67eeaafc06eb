// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "csrc/base/status.h"
#include "csrc/format/tree.h"

namespace bytecheckpoint::format {

/// Largest pickle that is decoded here. Beyond this size torch.load costs little compared with the values themselves.
inline constexpr int64_t kMaxBuiltinPickleBytes = 1 << 20;

/// Returns the most bytes that a value without its children takes in a pickle of ours.
/// \param text_bytes  Length of a string (in UTF-8) or of bytes; 0 for other kinds.
constexpr int64_t most_pickled_bytes(Tree::Kind kind, int64_t text_bytes = 0) {
  // Bytes are pickled as a call on text, in which each byte may become two. An int has opcode, length and 8 bytes.
  return kind == Tree::Kind::kBytes ? 48 + 2 * text_bytes : 10 + text_bytes;
}

/// Returns the archive that holds `tree` as `torch.save(value)` would save it. `torch.load` reads it, with
/// `weights_only` too.
///
/// Uses protocol 2 without a memo, because all versions of `weights_only` read that. As in torch's archives, the
/// contents of entries begin at multiples of 64. Deterministic: equal trees give equal bytes, in every version of this
/// code.
/// \param tree  No deeper than kMaxTreeDepth, with less than 4 GiB of text.
std::string encode_builtin_archive(const Tree& tree);

/// Returns the archive of a pickle that is less than 4 GiB long, as above; and how long the archive is.
std::string archive_of_pickle(std::string_view pickle);
int64_t archive_bytes_of_pickle(int64_t pickle_bytes);

/// Decodes an archive of torch.save or `encode_builtin_archive`, if its value is made of builtin types alone. Nothing
/// in the pickle is run. If a dict has equal keys, all are kept, in order.
///
/// \returns nullopt for everything else, which the caller then leaves to torch.load: tensors, objects, sets, ints
/// beyond 64 bits, text with surrogates, values nested deeper than kMaxTreeDepth, pickles larger than
/// kMaxBuiltinPickleBytes, other files; and for a value in which one list or dict stands in several places, because
/// decoding would make several of it. kCorrupt for an archive that is damaged, or whose pickle fails its CRC.
base::Result<std::optional<Tree>> decode_builtin_archive(std::string_view archive);

}  // namespace bytecheckpoint::format
