// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/file.h"

#include <cerrno>

#include "csrc/base/bytes.h"
#include "csrc/io/directory.h"

namespace bytecheckpoint::io {

using base::Status;
using base::text;

namespace {

/// How much of a packed file is read at a time.
constexpr int64_t kUnpackedBytes = 128 << 10, kUnpackedObjectBytes = 4 << 20;

/// \returns kCorrupt for the name of a checkpoint file that leads out of its URL.
Status check_beneath(const std::string& url, const std::string& name) {
  if (!name.empty() && name.front() != '/' && (name + "/").find("../") == std::string::npos) return Status::ok();
  const std::string path = join(url, name);
  return Status::make(
      base::Code::kCorrupt,
      text("open(", path, "): the name leads out of ", url, ", which the name of a checkpoint file must not do"), path,
      EXDEV);
}

}  // namespace

base::Result<File> File::open(const std::string& directory, const std::string& name, bool direct) {
  File file;
  if (is_url(directory)) {
    const std::string path = join(directory, name);
    BCP_RETURN_IF_ERROR(check_beneath(directory, name));
    BCP_ASSIGN_OR_RETURN(const StorePlace place, place_in_store(path));
    if (place.store->in_memory() != nullptr) {
      BCP_ASSIGN_OR_RETURN(MemoryFile memory, MemoryFile::open(place, path));
      if (memory.is_open()) {
        file.file_ = std::move(memory);
        return file;
      }
    }
    BCP_ASSIGN_OR_RETURN(file.file_, ObjectFile::open(place, path));
  } else {
    BCP_ASSIGN_OR_RETURN(file.file_, DiskFile::open(directory, name, direct));
  }
  return file;
}

base::Result<File> File::create(const std::string& path, bool direct) {
  File file;
  if (is_url(path)) {
    BCP_ASSIGN_OR_RETURN(const StorePlace place, place_in_store(path));
    if (place.store->in_memory() != nullptr) {
      BCP_ASSIGN_OR_RETURN(file.file_, MemoryFile::create(place, path));
    } else {
      BCP_ASSIGN_OR_RETURN(file.file_, ObjectFile::create(place, path));
    }
  } else {
    BCP_ASSIGN_OR_RETURN(file.file_, DiskFile::create(path, direct));
  }
  return file;
}

Status File::write_at(const void* bytes, int64_t size, int64_t offset) {
  return std::visit([&](auto& file) { return file.write_at(bytes, size, offset); }, file_);
}

Status File::write_at(const std::vector<std::string_view>& pieces, int64_t offset) {
  return std::visit([&](auto& file) { return file.write_at(pieces, offset); }, file_);
}

Status File::unpack(const base::Packing& packing) {
  BCP_ASSIGN_OR_RETURN(const int64_t bytes, size());
  BCP_ASSIGN_OR_RETURN(const base::FileVersion now, version());
  if (packing.bytes > bytes || packing.offset > bytes - packing.bytes) {
    return Status::make(base::Code::kCorrupt, text("the file has only ", bytes, " bytes"))
        .at(packing.offset, packing.bytes)
        .in_file(path());
  }
  // Each read of an object is a request.
  const int64_t read_bytes = std::holds_alternative<ObjectFile>(file_) ? kUnpackedObjectBytes : kUnpackedBytes;
  auto borrowed = Unpacker::borrow(text(path(), '\n', now.to_text()), packing, read_bytes);
  if (!borrowed.is_ok()) return borrowed.status().at(packing.offset, packing.bytes).in_file(path());
  unpacker_ = std::move(borrowed.value());
  unpacked_ = now;
  return Status::ok();
}

Status File::explain(Status failure) const {
  if (unpacker_ != nullptr && failure.code() == base::Code::kCorrupt) {
    BCP_ASSIGN_OR_RETURN(const base::FileVersion now, version());
    if (!unpacked_.is_same(now)) {
      return Status::make(
          base::Code::kChanged,
          text("read(", path(), "): the file is written again: now ", now.to_text(), ", before ", unpacked_.to_text()),
          path());
    }
  }
  // An unpacker does not know the file.
  return failure.path().empty() ? std::move(failure).in_file(path()) : failure;
}

base::Result<int64_t> File::read_stored(void* bytes, int64_t size, int64_t offset, int64_t wanted) {
  if (auto* const disk = std::get_if<DiskFile>(&file_)) return disk->read_at(bytes, size, offset, wanted);
  if (auto* const memory = std::get_if<MemoryFile>(&file_)) return memory->read_at(bytes, size, offset);
  return std::get<ObjectFile>(file_).read_at(bytes, size, offset);
}

base::Result<int64_t> File::read_at(void* bytes, int64_t size, int64_t offset, int64_t wanted) {
  const auto stored = [&](void* to, int64_t count, int64_t at) { return read_stored(to, count, at, count); };
  base::Result<int64_t> done =
      unpacker_ == nullptr ? read_stored(bytes, size, offset, wanted) : unpacker_->read_at(bytes, size, offset, stored);
  if (!done.is_ok()) return explain(done.status());
  if (done.value() >= wanted) return done;
  return Status::make(
      base::Code::kCorrupt,
      text("pread(", path(), ", offset=", offset, ", ", wanted, " bytes): file ends after ", done.value(), " bytes"),
      path(), ENODATA);
}

base::Result<std::string> File::read(int64_t offset, int64_t size) {
  std::string bytes(static_cast<size_t>(size), '\0');
  BCP_RETURN_IF_ERROR(read_at(bytes.data(), size, offset, size).status());
  return bytes;
}

base::Result<int64_t> File::size() const {
  if (unpacker_ != nullptr) return unpacker_->size();
  return std::visit([](const auto& file) { return file.size(); }, file_);
}

base::Result<base::FileVersion> File::version() const {
  return std::visit([](const auto& file) { return file.version(); }, file_);
}

Status File::reserve(int64_t bytes) {
  if (auto* const disk = std::get_if<DiskFile>(&file_)) return disk->reserve(bytes);
  if (auto* const memory = std::get_if<MemoryFile>(&file_)) return memory->reserve(bytes);
  return Status::ok();
}

bool File::is_in_memory() const {
  return unpacker_ == nullptr && std::holds_alternative<MemoryFile>(file_);
}

uint8_t* File::memory(int64_t offset, int64_t size) const {
  const auto* const memory = std::get_if<MemoryFile>(&file_);
  return memory == nullptr ? nullptr : memory->memory(offset, size);
}

Status File::truncate(int64_t bytes) {
  return std::visit([&](auto& file) { return file.truncate(bytes); }, file_);
}

Status File::sync() {
  if (auto* const disk = std::get_if<DiskFile>(&file_)) return disk->sync();
  if (auto* const memory = std::get_if<MemoryFile>(&file_)) return memory->finish();
  return std::get<ObjectFile>(file_).finish();
}

Status File::close() {
  return std::visit([](auto& file) { return file.close(); }, file_);
}

bool File::is_open() const {
  return std::visit([](const auto& file) { return file.is_open(); }, file_);
}

const std::string& File::path() const {
  return std::visit([](const auto& file) -> const std::string& { return file.path(); }, file_);
}

base::Result<std::string> read_file(const std::string& directory, const std::string& name) {
  BCP_ASSIGN_OR_RETURN(File file, File::open(directory, name, /*direct=*/false));
  BCP_ASSIGN_OR_RETURN(const int64_t size, file.size());
  return file.read(0, size);
}

}  // namespace bytecheckpoint::io
