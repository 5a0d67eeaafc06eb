// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest/metadata_file.h"

#include "csrc/format/dcp/compare_metadata.h"
#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"
#include "tests/fuzz/valid_manifest.h"

namespace bytecheckpoint::fuzz {

/// What is read can be written, with a pickle that matches the manifest.
std::string metadata_file(std::string_view bytes) {
  using namespace format;  // NOLINT
  PeakMemory memory(bytes.size());
  const auto decoded = decode_metadata_file(bytes);
  BCP_ALL_HOLD(memory.stop());
  const auto pickle = pickle_part(bytes);
  BCP_HOLDS(!decoded.is_ok() || pickle.is_ok());
  const base::Status checked = check_pickle(bytes);
  BCP_HOLDS(!checked.is_ok() || pickle.is_ok());
  if (!decoded.is_ok()) return {};
  BCP_ALL_HOLD(check_manifest(decoded.value()));
  if (checked.is_ok()) (void)compare_metadata(pickle.value(), decoded.value());

  const std::string once = encode_metadata_file(decoded.value());
  const auto again = decode_metadata_file(once);
  BCP_HOLDS(again.is_ok());
  BCP_HOLDS(check_pickle(once).is_ok());
  BCP_HOLDS(encode_metadata_file(again.value()) == once);
  // Repeated texts and values are shared in the pickle, and the reader refuses too much sharing.
  const std::string difference = compare_metadata(pickle_part(once).value(), again.value());
  if (difference.find("than a pickle of this size may hold") == difference.npos) BCP_HOLDS(difference.empty());
  return {};
}

}  // namespace bytecheckpoint::fuzz
