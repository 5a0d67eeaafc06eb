// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/planned_files.h"

#include <cerrno>
#include <numeric>

#include "csrc/io/directory.h"
#include "csrc/io/file_system.h"
#include "csrc/io/object_store.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::FileVersion;
using base::Status;
using base::text;

Status changed(const std::string& path, const std::string& found, const FileVersion& planned) {
  return Status::make(Code::kChanged,
                      text("read(", path, "): the file was replaced or written again since the checkpoint was opened: ",
                           "now ", found, ", then ", planned.to_text()),
                      path);
}

Status compare(const io::File& file, const FileVersion& planned) {
  BCP_ASSIGN_OR_RETURN(const FileVersion now, file.version());
  return planned.is_same(now) ? Status::ok() : changed(file.path(), now.to_text(), planned);
}

Status check(const std::string& directory, const std::string& name, const FileVersion& planned) {
  if (!planned.is_known()) return Status::ok();
  const auto file = io::File::open(directory, name, /*direct=*/false);
  if (file.is_ok()) return compare(file.value(), planned);
  if (file.status().sys_errno() != ENOENT) return file.status();
  return changed(io::join(directory, name), "it is gone", planned);
}

}  // namespace

base::Result<FileVersion> version_to_note(const io::File& file, bool has_lasting_inodes) {
  BCP_ASSIGN_OR_RETURN(FileVersion version, file.version());
  if (!has_lasting_inodes) version.inode = 0;
  return version;
}

base::Result<Description> read_description(const std::string& directory, const std::string& name, int64_t most_bytes,
                                           std::string_view way_out) {
  BCP_ASSIGN_OR_RETURN(io::File file, io::File::open(directory, name, /*direct=*/false));
  Description out;
  const bool has_lasting_inodes = !io::is_url(directory) && io::has_lasting_inodes(directory);
  BCP_ASSIGN_OR_RETURN(out.version, version_to_note(file, has_lasting_inodes));
  BCP_ASSIGN_OR_RETURN(const int64_t size, file.size());
  if (size > most_bytes) {
    return Status::make(Code::kUnsupported,
                        text("read(", file.path(), "): it has ", size, " bytes; at most ", most_bytes, " are read",
                             way_out.empty() ? "" : ": ", way_out),
                        file.path());
  }
  BCP_ASSIGN_OR_RETURN(out.bytes, file.read(0, size));
  return out;
}

base::Result<io::File> open_planned(const std::string& directory, const format::FileEntry& planned, bool direct) {
  BCP_ASSIGN_OR_RETURN(io::File file, io::File::open(directory, planned.name, direct && !planned.packing.is_packed()));
  if (planned.version.is_known()) BCP_RETURN_IF_ERROR(compare(file, planned.version));
  if (!planned.packing.is_packed()) return file;
  const Status unpacked = file.unpack(planned.packing);
  if (unpacked.is_ok()) return file;
  if (planned.version.is_known()) BCP_RETURN_IF_ERROR(compare(file, planned.version));  // it may be cut off just now
  return unpacked;
}

Status check_unchanged(const std::string& directory, const format::Manifest& manifest,
                       const std::vector<uint32_t>& files) {
  for (const uint32_t number : files) {
    const format::FileEntry& file = manifest.files[number];
    BCP_RETURN_IF_ERROR(check(directory, file.name, file.version));
  }
  return Status::ok();
}

Status check_all_unchanged(const std::string& directory, const format::Manifest& manifest) {
  std::vector<uint32_t> all(manifest.files.size());
  std::iota(all.begin(), all.end(), uint32_t{0});
  BCP_RETURN_IF_ERROR(check_unchanged(directory, manifest, all));
  return check_description(manifest);
}

Status check_description(const format::Manifest& manifest) {
  const auto& foreign = manifest.foreign;
  if (!foreign.has_value()) return Status::ok();
  return check(foreign->description.directory, foreign->description.name, foreign->description.version);
}

std::string versions_of(const format::Manifest& manifest) {
  const format::ForeignMeta& foreign = *manifest.foreign;
  std::string out = text(foreign.format, "\n", foreign.description.name, " ", foreign.description.version.to_text());
  for (const format::FileEntry& file : manifest.files) out += text("\n", file.name, " ", file.version.to_text());
  return out;
}

}  // namespace bytecheckpoint::engine
