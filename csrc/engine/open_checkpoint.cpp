// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open_checkpoint.h"

#include <cerrno>

#include "csrc/format/metadata_file.h"
#include "csrc/io/directory.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

/// Does any file of our naming in `directory` begin like ours? Then a metadata file without our trailer is one that
/// lost it: losing the trailer must not lose the checks.
bool has_our_data(const std::string& directory) {
  const auto names = io::list_directory(directory);
  if (!names.is_ok()) return false;
  for (const std::string& name : names.value()) {
    if (name.size() < 7 || name.substr(name.size() - 7) != ".distcp") continue;
    auto file = io::File::open(io::join(directory, name), false);
    char magic[8];
    if (file.is_ok() && file.value().read_at(magic, 8, 0, 8).is_ok() &&
        std::string_view(magic, 8) == format::kDataMagic) {
      return true;
    }
  }
  return false;
}

Status without_trailer(const std::string& directory, const std::string& path, const std::string& bytes) {
  if (bytes.empty()) return Status::make(Code::kCorrupt, text("read(", path, "): file is empty"), path);
  if (bytes.find(format::kSaveIdPrefix) != std::string::npos || has_our_data(directory)) {
    return Status::make(Code::kCorrupt,
                        text("read(", path, ", offset=", bytes.size(),
                             "): the trailer is missing: cut, damaged, or rewritten by another tool"),
                        path);
  }
  return Status::make(Code::kUnsupported,
                      text("read(", path,
                           "): not written by bytecheckpoint; checkpoints that stock DCP wrote are not "
                           "yet read: use its own FileSystemReader"),
                      path);
}

}  // namespace

base::Result<format::Manifest> open_checkpoint(const std::string& directory, std::string_view name, bool check_pickle) {
  const std::string path = io::join(directory, std::string(name));
  base::Result<std::string> bytes = io::read_file(path);
  if (!bytes.is_ok()) {
    const int error = bytes.status().sys_errno();
    if (error != ENOENT && error != ENOTDIR) return bytes.status();
    return Status::make(Code::kNotFound, text("open(", path, "): no checkpoint there"), path, error);
  }
  base::Result<format::Manifest> manifest = format::decode_metadata_file(bytes.value());
  if (!manifest.is_ok()) {
    const Status fault = manifest.status();
    if (fault.code() == Code::kNotFound) return without_trailer(directory, path, bytes.value());
    return Status::make(fault.code(), text("read(", path, "): ", fault.message()), path);
  }
  if (check_pickle) {
    const Status pickle = format::check_pickle(bytes.value());
    if (!pickle.is_ok()) return Status::make(pickle.code(), text("read(", path, "): ", pickle.message()), path);
  }
  return manifest;
}

}  // namespace bytecheckpoint::engine
