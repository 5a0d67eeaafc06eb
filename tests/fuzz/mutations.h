// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/fuzz/property.h"

namespace bytecheckpoint::fuzz {

// Each changes one part of what it understands, and puts the whole together again under right lengths and checksums.
// What they do not understand they give up: \returns nothing.

/// A section of a manifest, which the others make room for.
std::string mutate_manifest(std::string_view bytes, size_t max_bytes, Change* change);
/// The pickle or a section of the manifest of a `.metadata`, or its trailer.
std::string mutate_metadata_file(std::string_view bytes, size_t max_bytes, Change* change);
/// Header, trailer or table of a data file.
std::string mutate_data_file(std::string_view bytes, size_t max_bytes, Change* change);
/// The content or the name of an entry of a stored zip archive.
std::string mutate_archive(std::string_view bytes, size_t max_bytes, Change* change);
/// What stands between the protocol and STOP; frames are taken away.
std::string mutate_pickle(std::string_view bytes, size_t max_bytes, Change* change);
/// Either part of what fuzz_save_answer.cpp takes apart.
std::string mutate_assignment(std::string_view bytes, size_t max_bytes, Change* change);

}  // namespace bytecheckpoint::fuzz
