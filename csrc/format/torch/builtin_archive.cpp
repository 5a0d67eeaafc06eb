// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/builtin_archive.h"

#include <array>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/base/crc32.h"
#include "csrc/format/archive/zip_headers.h"
#include "csrc/format/archive/zip_layout.h"
#include "csrc/format/pickle/pickle_reader.h"
#include "csrc/format/pickle/pickle_tree.h"
#include "csrc/format/pickle/pickle_writer.h"
#include "csrc/format/torch/pickle_entry.h"

namespace bytecheckpoint::format {
namespace {

constexpr int64_t kAlignment = 64;  // torch's
constexpr uint32_t kEncode = 1;     // `_codecs.encode`, the only global that is accepted
constexpr size_t kNumEntries = 3;

/// Name and content of each entry of an archive.
using Entries = std::array<std::pair<std::string_view, std::string_view>, kNumEntries>;

Entries entries_around(std::string_view pickle) {
  return {{{"archive/data.pkl", pickle}, {"archive/byteorder", "little"}, {"archive/version", "3\n"}}};
}

/// The extra field of an entry whose header stands at `header_offset`.
std::string padding_before(int64_t header_offset, std::string_view name) {
  return zip::padding_to(header_offset + zip::kLocalHeaderBytes + static_cast<int64_t>(name.size()), kAlignment);
}

}  // namespace

std::string encode_builtin_archive(const Tree& tree) {
  PickleWriter writer(2);
  writer.tree(tree);
  return archive_of_pickle(writer.finish());
}

std::string archive_of_pickle(std::string_view pickle) {
  base::ByteWriter out, directory;
  for (const auto& [name, content] : entries_around(pickle)) {
    zip::EntryHead head;
    head.name = name;
    head.crc = base::crc32(0, content.data(), content.size());
    head.bytes = static_cast<uint32_t>(content.size());
    zip::write_central_entry(head, "", static_cast<uint32_t>(out.size()), &directory);
    zip::write_local_header(head, padding_before(static_cast<int64_t>(out.size()), name), &out);
    out.raw(content);
  }
  const auto begin = static_cast<uint32_t>(out.size());
  out.raw(directory.bytes());
  zip::write_end(kNumEntries, static_cast<uint32_t>(directory.size()), begin, &out);
  return out.take();
}

int64_t archive_bytes_of_pickle(int64_t pickle_bytes) {
  constexpr int64_t kCentralEntryBytes = 46, kEndBytes = 22;
  int64_t at = 0, directory = 0;
  for (const auto& [name, content] : entries_around({})) {
    const auto name_bytes = static_cast<int64_t>(name.size());
    at += zip::kLocalHeaderBytes + name_bytes + static_cast<int64_t>(padding_before(at, name).size());
    at += directory == 0 ? pickle_bytes : static_cast<int64_t>(content.size());
    directory += kCentralEntryBytes + name_bytes;
  }
  return at + directory + kEndBytes;
}

base::Result<std::optional<Tree>> decode_builtin_archive(std::string_view archive) {
  const std::optional<Tree> other;
  ArchiveReader reader(archive);
  BCP_ASSIGN_OR_RETURN(const std::optional<PickleEntry> entry, read_value_entry(&reader, kMaxBuiltinPickleBytes));
  if (!entry.has_value()) return other;

  const PickleRules rules{[](std::string_view module, std::string_view name) {
                            return module == "_codecs" && name == "encode" ? std::make_optional(kEncode) : std::nullopt;
                          },
                          false};
  const base::Result<Pickle> pickle = read_pickle(entry->pickle, rules);
  // What this reader finds corrupt, torch may still be able to read: text with surrogates, for example.
  if (!pickle.is_ok() || pickle.value().end() != entry->pickle.size()) return other;
  UnfoldBudget budget(pickle.value());
  base::Result<Tree> tree =
      unfold_tree(pickle.value(), pickle.value().root(), &budget, {/*refuse_shared=*/true, kEncode});
  if (!tree.is_ok()) return other;
  return std::make_optional(std::move(tree.value()));
}

}  // namespace bytecheckpoint::format
