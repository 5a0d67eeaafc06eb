// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/open_checkpoint.h"

#include <algorithm>
#include <cerrno>
#include <iterator>

#include "csrc/engine/open/planned_files.h"
#include "csrc/format/dcp/foreign_metadata.h"
#include "csrc/format/manifest/metadata_file.h"
#include "csrc/io/directory.h"
#include "csrc/io/file.h"
#include "csrc/io/file_system.h"
#include "csrc/io/late_changes.h"
#include "csrc/io/object_store.h"
#include "csrc/staging/available_memory.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr int64_t kLargeMarkBytes = 64 << 20;
constexpr char kPickleProto = '\x80', kPickleStop = '.';

/// Whether a failure to read a file tells nothing about it, as if it were absent. If the storage fails, so does the
/// caller: the failure may hide a file of ours.
bool tells_nothing(const Status& failure) {
  constexpr int kTellNothing[] = {ENOENT, ENOTDIR, EISDIR, EINVAL, ENXIO, EACCES, EPERM, ENAMETOOLONG};
  const int error = failure.sys_errno();
  return failure.code() != Code::kStorage ||
         std::find(std::begin(kTellNothing), std::end(kTellNothing), error) != std::end(kTellNothing);
}

/// Whether the file begins like a data file of ours. No for one that is absent or may not be read.
/// \param version  Receives its version if it can be read. Null: nobody wants it.
base::Result<bool> is_our_data(const std::string& directory, const std::string& name, bool has_lasting_inodes,
                               base::FileVersion* version) {
  auto file = io::File::open(directory, name, false);
  if (!file.is_ok()) return tells_nothing(file.status()) ? base::Result<bool>(false) : file.status();
  if (version != nullptr) {
    BCP_ASSIGN_OR_RETURN(*version, version_to_note(file.value(), has_lasting_inodes));
  }
  const base::Result<std::string> magic = file.value().read(0, format::kDataMagic.size());
  if (!magic.is_ok()) return tells_nothing(magic.status()) ? base::Result<bool>(false) : magic.status();
  return magic.value() == format::kDataMagic;
}

/// Whether any `.distcp` file in `directory` begins like a data file of ours.
base::Result<bool> has_our_data(const std::string& directory) {
  BCP_ASSIGN_OR_RETURN(const std::vector<std::string> names, io::list_directory(directory));
  for (const std::string& name : names) {
    if (name.size() < 7 || name.substr(name.size() - 7) != ".distcp") continue;
    BCP_ASSIGN_OR_RETURN(const bool is_ours, is_our_data(directory, name, false, nullptr));
    if (is_ours) return true;
  }
  return false;
}

/// Notes the versions of the data files that `manifest` names. \returns whether any of them begins like one of ours.
/// Only files that it names count: others may be left from a save of ours that stock DCP has replaced.
base::Result<bool> note_versions(const std::string& directory, bool has_lasting_inodes, format::Manifest* manifest) {
  bool any_of_ours = false;
  for (format::FileEntry& file : manifest->files) {
    BCP_ASSIGN_OR_RETURN(const bool is_ours, is_our_data(directory, file.name, has_lasting_inodes, &file.version));
    any_of_ours = any_of_ours || is_ours;
  }
  return any_of_ours;
}

bool has_our_save_id(const format::Tree& storage_meta) {
  format::TreeReader in(storage_meta);
  for (uint32_t left = in.next().num_children; left != 0; left -= 2) {
    if (in.next().text == "save_id") {
      return in.next().text.substr(0, format::kSaveIdPrefix.size()) == format::kSaveIdPrefix;
    }
    in.skip();
  }
  return false;
}

/// Whether this, which no reader of metadata understands, is a metadata file of ours that lost its trailer. Our save id
/// in it tells, or a data file of ours.
base::Result<bool> is_ours_in_pieces(const std::string& directory, const std::string& bytes) {
  if (bytes.find(format::kSaveIdPrefix) != std::string::npos) return true;
  return has_our_data(directory);
}

Status trailer_is_missing(const std::string& path, const std::string& bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  const int64_t tail = std::min(size, format::kMetadataTrailerBytes);
  return Status::make(Code::kCorrupt,
                      "the trailer is missing: the file was cut, damaged, or rewritten by another tool (in the last "
                      "case, Config(accept_rewritten_metadata=True) reads it)")
      .at(size - tail, tail)
      .in_file(path);
}

base::Result<format::Manifest> open_foreign(const std::string& directory, const Mark& mark,
                                            const OpenOptions& options) {
  const std::string name = mark_name(options.scope), path = io::join(directory, name);
  if (mark.bytes.empty()) return Status::make(Code::kCorrupt, text("read(", path, "): file is empty"), path);
  base::Result<format::Manifest> foreign = format::read_foreign_metadata(mark.bytes);
  if (!foreign.is_ok()) {
    BCP_ASSIGN_OR_RETURN(const bool is_ours, is_ours_in_pieces(directory, mark.bytes));
    return is_ours ? trailer_is_missing(path, mark.bytes) : foreign.status().in_file(path);
  }
  format::Manifest& manifest = foreign.value();
  const bool has_lasting_inodes = !io::is_url(directory) && io::has_lasting_inodes(directory);
  BCP_ASSIGN_OR_RETURN(const bool any_of_ours, note_versions(directory, has_lasting_inodes, &manifest));
  const bool was_ours = any_of_ours || has_our_save_id(manifest.foreign->storage_meta);
  if (was_ours && !options.accept_rewritten) return trailer_is_missing(path, mark.bytes);
  manifest.foreign->description = {directory, name, mark.version};
  if (!has_lasting_inodes) manifest.foreign->description.version.inode = 0;
  // A save that was committed meanwhile has written these data files.
  BCP_RETURN_IF_ERROR(check_description(manifest));
  return foreign;
}

/// Checks a large mark before all of it is read into memory, because a file may claim any length, and have holes.
Status check_large(io::File& file, int64_t size) {
  BCP_ASSIGN_OR_RETURN(const std::string first, file.read(0, 1));
  BCP_ASSIGN_OR_RETURN(const std::string last,
                       file.read(size - format::kMetadataTrailerBytes, format::kMetadataTrailerBytes));
  const auto trailer = format::decode_metadata_trailer(last, size);
  if (!trailer.is_ok() && trailer.status().code() != Code::kNotFound) return trailer.status().in_file(file.path());
  if (!trailer.is_ok() && (first.front() != kPickleProto || last.back() != kPickleStop)) {
    return Status::make(Code::kCorrupt,
                        text("read(", file.path(), "): the ", size, " bytes are not metadata: there is neither ",
                             "a trailer of bytecheckpoint at the end nor a pickle"),
                        file.path());
  }
  const int64_t available = staging::available_memory_bytes();
  if (available < 0 || size <= available / 2) return Status::ok();
  return Status::storage("read", file.path(),
                         text(size, " bytes needed, but only ", available, " bytes of memory are available"), ENOMEM);
}

base::Result<Mark> read_mark_once(const std::string& directory, Scope scope) {
  BCP_ASSIGN_OR_RETURN(io::File file, open_mark(directory, scope));
  BCP_ASSIGN_OR_RETURN(const int64_t size, file.size());
  if (size > kLargeMarkBytes) BCP_RETURN_IF_ERROR(check_large(file, size));
  Mark mark;
  BCP_ASSIGN_OR_RETURN(mark.version, file.version());
  BCP_ASSIGN_OR_RETURN(mark.bytes, file.read(0, size));
  return mark;
}

base::Result<std::string> identity_of_mark_once(const std::string& directory, Scope scope) {
  base::Result<io::File> file = open_mark(directory, scope);
  if (file.status().code() == Code::kNotFound) return std::string();
  if (!file.is_ok()) return file.status();
  BCP_ASSIGN_OR_RETURN(const int64_t size, file.value().size());
  const int64_t tail = std::min(size, format::kMetadataTrailerBytes);
  BCP_ASSIGN_OR_RETURN(const std::string last, file.value().read(size - tail, tail));
  return text(size, ' ') + last;
}

}  // namespace

base::Result<Mark> read_mark(const std::string& directory, Scope scope) {
  return io::read_what_is_there([&] { return read_mark_once(directory, scope); });
}

base::Result<std::string> identity_of_mark(const std::string& directory, Scope scope) {
  return io::read_what_is_there([&] { return identity_of_mark_once(directory, scope); });
}

base::Result<io::File> open_mark(const std::string& directory, Scope scope) {
  io::freshen(directory);
  base::Result<io::File> file = io::File::open(directory, mark_name(scope), /*direct=*/false);
  const int error = file.status().sys_errno();
  if (error != ENOENT && error != ENOTDIR) return file;
  const std::string path = io::join(directory, mark_name(scope));
  return Status::make(Code::kNotFound, text("open(", path, "): no checkpoint there"), path, error);
}

base::Result<format::Manifest> decode_mark(const std::string& directory, const Mark& mark, const OpenOptions& options) {
  const std::string path = io::join(directory, mark_name(options.scope));
  base::Result<format::Manifest> manifest = format::decode_metadata_file(mark.bytes);
  if (!manifest.is_ok()) {
    if (manifest.status().code() == Code::kNotFound) return open_foreign(directory, mark, options);
    return manifest.status().in_file(path);
  }
  if (options.check_pickle) BCP_RETURN_IF_ERROR(format::check_pickle(mark.bytes).in_file(path));
  return manifest;
}

base::Result<format::Manifest> open_checkpoint(const std::string& directory, const OpenOptions& options) {
  BCP_ASSIGN_OR_RETURN(const Mark mark, read_mark(directory, options.scope));
  return decode_mark(directory, mark, options);
}

}  // namespace bytecheckpoint::engine
