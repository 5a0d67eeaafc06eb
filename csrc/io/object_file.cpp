// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/object_file.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "csrc/base/bytes.h"

namespace bytecheckpoint::io {

using base::Status;
using base::text;

base::Result<ObjectFile> ObjectFile::open(StorePlace place, const std::string& url) {
  ObjectFile file;
  file.path_ = url;
  BCP_ASSIGN_OR_RETURN(file.object_, place.store->open(place.name));
  file.store_ = std::move(place.store);
  file.name_ = std::move(place.name);
  return file;
}

base::Result<ObjectFile> ObjectFile::create(const StorePlace& place, const std::string& url) {
  ObjectFile file;
  file.path_ = url;
  BCP_ASSIGN_OR_RETURN(file.upload_, place.store->create(place.name));
  return file;
}

Status ObjectFile::write_at(const void* bytes, int64_t size, int64_t offset) {
  if (upload_ != nullptr) return upload_->write_at(static_cast<const uint8_t*>(bytes), size, offset);
  return Status::storage("pwrite", path_, text("offset=", offset, ", ", size, " bytes"), EBADF);
}

Status ObjectFile::write_at(const std::vector<std::string_view>& pieces, int64_t offset) {
  for (const std::string_view piece : pieces) {
    const auto size = static_cast<int64_t>(piece.size());
    if (size > 0) BCP_RETURN_IF_ERROR(write_at(piece.data(), size, offset));
    offset += size;
  }
  return Status::ok();
}

base::Result<int64_t> ObjectFile::read_at(void* bytes, int64_t size, int64_t offset) {
  if (store_ == nullptr) {
    return Status::storage("pread", path_, text("offset=", offset, ", ", size, " bytes"), EBADF);
  }
  auto* to = static_cast<uint8_t*>(bytes);
  int64_t done = 0;
  while (done < std::min(size, object_.bytes - offset)) {
    const int64_t left = std::min(size, object_.bytes - offset) - done;
    BCP_ASSIGN_OR_RETURN(const int64_t got, store_->read(name_, object_, to + done, left, offset + done));
    if (got == 0) break;
    done += got;
  }
  return done;
}

base::Result<int64_t> ObjectFile::size() const {
  if (store_ == nullptr) return Status::storage("stat", path_, "", EBADF);
  return object_.bytes;
}

base::Result<base::FileVersion> ObjectFile::version() const {
  if (store_ == nullptr) return Status::storage("stat", path_, "", EBADF);
  base::FileVersion version;
  version.bytes = object_.bytes;
  version.etag = object_.version;
  return version;
}

Status ObjectFile::truncate(int64_t bytes) {
  if (upload_ == nullptr) return Status::storage("ftruncate", path_, text(bytes, " bytes"), EBADF);
  object_.bytes = bytes;
  return Status::ok();
}

Status ObjectFile::finish() {
  const std::shared_ptr<Upload> upload = std::move(upload_);
  return upload == nullptr ? Status::ok() : upload->finish(object_.bytes);
}

Status ObjectFile::close() {
  store_.reset();
  return finish();
}

}  // namespace bytecheckpoint::io
