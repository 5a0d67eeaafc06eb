// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/fuzz/property.h"

namespace bytecheckpoint::fuzz {

// Each function changes one part of its format, and rebuilds the whole with correct lengths and checksums.
// \returns nothing for input that it does not understand.

/// Mutates a section of a manifest and moves the others accordingly.
std::string mutate_manifest(std::string_view bytes, size_t max_bytes, Change* change);
/// Mutates the pickle, a section of the manifest, or the trailer of a `.metadata`.
std::string mutate_metadata_file(std::string_view bytes, size_t max_bytes, Change* change);
/// Mutates header, trailer or table of a data file.
std::string mutate_data_file(std::string_view bytes, size_t max_bytes, Change* change);
/// Mutates the content or the name of an entry of a stored zip archive.
std::string mutate_archive(std::string_view bytes, size_t max_bytes, Change* change);
/// Mutates the bytes between the protocol and STOP, and removes frames.
std::string mutate_pickle(std::string_view bytes, size_t max_bytes, Change* change);
/// Mutates either of the two parts that fuzz_rank_assignment.cpp splits.
std::string mutate_assignment(std::string_view bytes, size_t max_bytes, Change* change);

}  // namespace bytecheckpoint::fuzz
