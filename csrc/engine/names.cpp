// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/names.h"

#include <algorithm>

#include "csrc/base/status.h"
#include "csrc/format/data_file.h"

namespace bytecheckpoint::engine {
namespace {

bool consume(std::string_view* name, std::string_view prefix) {
  if (name->substr(0, prefix.size()) != prefix) return false;
  name->remove_prefix(prefix.size());
  return true;
}

/// Removes `__{rank}` from the start of `name`. Changes nothing, and returns false, if it does not begin so.
bool consume_rank(std::string_view* name, uint32_t* rank) {
  std::string_view rest = *name;
  if (!consume(&rest, "__")) return false;
  const size_t digits = std::min(rest.find_first_not_of("0123456789"), rest.size());
  if (digits == 0 || digits > 10) return false;
  uint64_t value = 0;
  for (const char digit : rest.substr(0, digits)) value = 10 * value + static_cast<uint64_t>(digit - '0');
  if (value > UINT32_MAX) return false;
  *name = rest.substr(digits);
  *rank = static_cast<uint32_t>(value);
  return true;
}

}  // namespace

std::string mark_name(Scope scope) {
  return scope.has_value() ? base::text("__", *scope, kMetadataName) : std::string(kMetadataName);
}

bool is_rank_metadata_name(std::string_view name, uint32_t* rank) {
  uint32_t unused;
  return consume_rank(&name, rank == nullptr ? &unused : rank) && name == kMetadataName;
}

std::string tmp_name(const base::Id& save_id, Scope scope) {
  return base::text(mark_name(scope), ".", base::to_hex(save_id), ".tmp");
}

bool is_tmp_name(std::string_view name, Scope* scope) {
  uint32_t rank;
  const bool of_rank = consume_rank(&name, &rank);
  if (scope != nullptr) *scope = of_rank ? Scope(rank) : Scope();
  base::Id id;
  return consume(&name, ".metadata.") && name.size() == 36 && name.substr(32) == ".tmp" &&
         base::id_from_hex(name.substr(0, 32), &id);
}

bool is_data_file_of(Scope scope, std::string_view name) {
  if (!format::is_data_file_name(name)) return false;
  uint32_t rank;
  return !scope.has_value() || (consume_rank(&name, &rank) && rank == *scope);
}

bool is_data_file_of_any_writer(std::string_view name) {
  if (format::is_data_file_name(name)) return true;
  uint32_t unused;
  const bool of_rank = consume_rank(&name, &unused);
  if (name == ".metadata.tmp") return true;
  if (!of_rank || !consume(&name, "_")) return false;
  const size_t digits = std::min(name.find_first_not_of("0123456789"), name.size());
  return digits > 0 && name.substr(digits) == ".distcp";
}

}  // namespace bytecheckpoint::engine
