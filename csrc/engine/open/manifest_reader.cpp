// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/manifest_reader.h"

#include <cstring>
#include <map>
#include <memory>

#include "csrc/engine/open/open_checkpoint.h"
#include "csrc/io/directory.h"
#include "csrc/io/file.h"
#include "csrc/io/io_deadline.h"
#include "csrc/io/late_changes.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;

/// Adds the file's name, unless the status has one: errors of the file system do.
Status naming(Status status, const std::string& path) {
  return status.path().empty() ? std::move(status).in_file(path) : std::move(status);
}

template <class T>
base::Result<T> naming(base::Result<T> result, const std::string& path) {
  if (result.is_ok()) return result;
  return naming(result.status(), path);
}

}  // namespace

base::Result<ManifestReader> ManifestReader::open(const std::string& directory, Scope scope, double io_timeout_s) {
  return io::read_what_is_there([&] { return open_once(directory, scope, io_timeout_s); });
}

base::Result<ManifestReader> ManifestReader::open_once(const std::string& directory, Scope scope, double io_timeout_s) {
  const std::string path = io::join(directory, mark_name(scope));
  BCP_ASSIGN_OR_RETURN(io::File opened, open_mark(directory, scope));
  const io::DeleteInBackground end{io_timeout_s > 0};
  const std::shared_ptr<io::File> file(new io::File(std::move(opened)), end);
  const std::shared_ptr<io::IoDeadline> deadline(new io::IoDeadline(io_timeout_s), end);
  BCP_ASSIGN_OR_RETURN(const int64_t file_bytes, file->size());
  const format::ReadInto read = [file, deadline](int64_t offset, int64_t size, char* into) -> Status {
    BCP_ASSIGN_OR_RETURN(const std::string bytes, deadline->run("pread", file->path(), [file, offset, size] {
      return file->read(offset, size);
    }));
    std::memcpy(into, bytes.data(), bytes.size());
    return Status::ok();
  };
  base::Result<format::ManifestView> view = format::ManifestView::open(file_bytes, read);
  if (view.is_ok()) return ManifestReader(path, std::move(view.value()));
  if (view.status().code() != Code::kNotFound) return naming(view.status(), path);
  return naming(Status::make(Code::kUnsupported, "there is no manifest of bytecheckpoint that could be read in parts"),
                path);
}

base::Result<format::Manifest> ManifestReader::read_head() {
  format::Manifest head;
  head.save_id = view_.save_id();
  BCP_ASSIGN_OR_RETURN(head.checkpoint_id, naming(view_.read_checkpoint_id(), path_));
  BCP_ASSIGN_OR_RETURN(head.user_metadata, naming(view_.read_user_metadata(), path_));
  BCP_ASSIGN_OR_RETURN(head.files, read_files());
  return head;
}

base::Result<std::vector<format::FileEntry>> ManifestReader::read_files() {
  std::vector<format::FileEntry> files;
  for (uint32_t number = 0; number < view_.num_files(); ++number) {
    BCP_ASSIGN_OR_RETURN(files.emplace_back(), read_file(number));
  }
  return files;
}

base::Result<format::Item> ManifestReader::read_part(const format::FoundItem& found,
                                                     const std::vector<tensor::Box>& boxes) {
  format::Item item = found.item;
  if (!item.is_tensor) {
    BCP_ASSIGN_OR_RETURN(format::Chunk chunk, naming(view_.read_chunk(found, 0), path_));
    item.chunks.push_back(std::move(chunk));
    return item;
  }
  std::map<uint32_t, format::Chunk> chunks;  // by number
  for (const tensor::Box& box : boxes) {
    BCP_ASSIGN_OR_RETURN(const auto overlapping, naming(view_.find_overlapping(found, box), path_));
    for (const uint32_t number : overlapping) {
      if (chunks.count(number) != 0) continue;
      BCP_ASSIGN_OR_RETURN(format::Chunk chunk, naming(view_.read_chunk(found, number), path_));
      chunks.emplace(number, std::move(chunk));
    }
  }
  for (auto& [number, chunk] : chunks) item.chunks.push_back(std::move(chunk));
  return item;
}

Status ManifestReader::check_blocks() {
  const Status checked = view_.check_blocks();
  return checked.is_ok() ? checked : naming(checked, path_);
}

base::Result<format::Item> ManifestReader::read_boxes(uint64_t number) {
  return naming(view_.read_boxes(number), path_);
}

base::Result<std::optional<format::FoundItem>> ManifestReader::find_item(std::string_view fqn) {
  return naming(view_.find_item(fqn), path_);
}

base::Result<std::vector<std::string>> ManifestReader::read_names() {
  return naming(view_.read_names(), path_);
}

base::Result<std::vector<format::Chunk>> ManifestReader::read_overlapping(const format::FoundItem& found,
                                                                          const tensor::Box& box) {
  base::Result<std::vector<format::Chunk>> chunks = view_.read_overlapping(found, box);
  // A box that is not possible is the caller's error, and not one of the file.
  if (!chunks.is_ok() && chunks.status().code() == Code::kInvalidArgument) return chunks;
  return naming(std::move(chunks), path_);
}

base::Result<format::FileEntry> ManifestReader::read_file(uint32_t number) {
  return naming(view_.read_file(number), path_);
}

}  // namespace bytecheckpoint::engine
