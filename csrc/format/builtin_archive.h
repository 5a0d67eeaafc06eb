// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "csrc/base/status.h"
#include "csrc/format/tree.h"

namespace bytecheckpoint::format {

/// Largest pickle that is decoded. Beyond it torch's own cost is nothing beside that of the values.
inline constexpr int64_t kMaxBuiltinPickleBytes = 1 << 20;

/// The most bytes that a value without its children takes in a pickle of ours.
/// \param text_bytes  Of a string (UTF-8) or of bytes.
constexpr int64_t most_pickled_bytes(Tree::Kind kind, int64_t text_bytes = 0) {
  // Bytes are a call on text, of which every character may take two; an int has opcode, length and 8 bytes.
  return kind == Tree::Kind::kBytes ? 48 + 2 * text_bytes : 10 + text_bytes;
}

/// The archive of what `torch.save(value)` would write: `torch.load` reads it, also under `weights_only`.
///
/// Protocol 2 without a memo, since that is what `weights_only` has always read. Entries begin at multiples of 64 as
/// torch's do. Deterministic: equal trees give equal bytes, for ever.
/// \param tree  No deeper than kMaxTreeDepth, less than 4 GiB of text.
std::string encode_builtin_archive(const Tree& tree);

/// The value of an archive of torch.save or of `encode_builtin_archive`, if it is made of builtin values alone.
///
/// \returns nullopt for anything else, which torch.load may know how to read: tensors, objects, sets, ints beyond 64
///   bits, text with surrogates, more than kMaxTreeDepth deep, larger than kMaxBuiltinPickleBytes, what is no such
///   archive at all; and for a list or dict that stands in several places, which would come back as several.
///   kCorrupt for an archive that is damaged, its pickle by CRC.
/// Of equal keys of a dict all are kept, in order. Runs nothing of the pickle.
base::Result<std::optional<Tree>> decode_builtin_archive(std::string_view archive);

}  // namespace bytecheckpoint::format
