// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/unpacker.h"

#include <dlfcn.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/base/per_process.h"

namespace bytecheckpoint::io {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr const char* kLibrary = "libzstd.so.1";
constexpr size_t kMostKeptBytes = 24 << 20;
constexpr int kMostWindowLog = 24;

/// The buffers of the library, as its header declares them.
struct ZstdIn {
  const void* bytes;
  size_t size;
  size_t position;
};
struct ZstdOut {
  void* bytes;
  size_t size;
  size_t position;
};

/// The functions of the library that are used. Its interface has been stable since 1.4.
struct Zstd {
  void* (*create)() = nullptr;
  size_t (*free)(void*) = nullptr;
  size_t (*begin)(void*) = nullptr;
  size_t (*set)(void*, int, int) = nullptr;
  size_t (*unpack)(void*, ZstdOut*, ZstdIn*) = nullptr;
  unsigned (*is_error)(size_t) = nullptr;
  const char* (*error_name)(size_t) = nullptr;
  size_t (*memory)(const void*) = nullptr;
  bool is_there = false;

  Zstd() {
    void* const handle = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return;
    is_there = find(handle, "ZSTD_createDStream", &create) && find(handle, "ZSTD_freeDStream", &free) &&
               find(handle, "ZSTD_initDStream", &begin) && find(handle, "ZSTD_DCtx_setParameter", &set) &&
               find(handle, "ZSTD_decompressStream", &unpack) && find(handle, "ZSTD_isError", &is_error) &&
               find(handle, "ZSTD_getErrorName", &error_name) && find(handle, "ZSTD_sizeof_DStream", &memory);
  }

  template <class Function>
  static bool find(void* library, const char* name, Function* found) {
    *found = reinterpret_cast<Function>(::dlsym(library, name));
    return *found != nullptr;
  }
};

const Zstd& zstd() {
  static const Zstd library;
  return library;
}

/// Those that were left in the middle, the last one first.
struct KeptUnpackers {
  base::Mutex mutex;
  std::deque<std::unique_ptr<Unpacker>> kept BCP_GUARDED_BY(mutex);
};

}  // namespace

base::Result<std::shared_ptr<Unpacker>> Unpacker::borrow(const std::string& content, const base::Packing& packing,
                                                         int64_t read_bytes) {
  if (!zstd().is_there) {
    return Status::make(Code::kUnsupported, text("it is packed by zstd, and this machine has no ", kLibrary,
                                                 " of version 1.4 or newer: install it, such as by apt-get install "
                                                 "libzstd1"));
  }
  std::unique_ptr<Unpacker> found;
  {
    auto& all = base::of_process<KeptUnpackers>();
    const base::MutexLock lock(all.mutex);
    const auto at = std::find_if(all.kept.begin(), all.kept.end(), [&](const std::unique_ptr<Unpacker>& each) {
      return each->packing_ == packing && each->content_ == content;
    });
    if (at != all.kept.end()) {
      found = std::move(*at);
      all.kept.erase(at);
    }
  }
  if (found == nullptr) found.reset(new Unpacker(content, packing, read_bytes));
  if (found->stream_ == nullptr) return Status::make(Code::kStorage, "zstd has no memory", {}, ENOMEM);
  return std::shared_ptr<Unpacker>(found.release(), &Unpacker::give_back);
}

void Unpacker::give_back(Unpacker* unpacker) {
  std::unique_ptr<Unpacker> owned(unpacker);
  size_t bytes = 0;
  {
    const base::MutexLock lock(owned->mutex_);
    if (!owned->is_sound_ || owned->position_ == 0 || owned->position_ == owned->size()) return;
  }
  auto& all = base::of_process<KeptUnpackers>();
  const base::MutexLock lock(all.mutex);
  all.kept.push_front(std::move(owned));
  for (size_t i = 0; i < all.kept.size(); ++i) {
    bytes += static_cast<size_t>(all.kept[i]->read_bytes_) + zstd().memory(all.kept[i]->stream_);
    if (bytes <= kMostKeptBytes) continue;
    all.kept.resize(i);
    return;
  }
}

Unpacker::Unpacker(std::string content, const base::Packing& packing, int64_t read_bytes)
    : content_(std::move(content)),
      packing_(packing),
      read_bytes_(std::min(read_bytes, packing.bytes)),
      stream_(zstd().create()),
      packed_(new uint8_t[static_cast<size_t>(read_bytes_)]) {
  constexpr int kWindowLogMax = 100;  // ZSTD_d_windowLogMax
  if (stream_ != nullptr) (void)zstd().set(stream_, kWindowLogMax, kMostWindowLog);
  const base::MutexLock lock(mutex_);
  begin_again();
}

Unpacker::~Unpacker() {
  (void)zstd().free(stream_);
}

void Unpacker::begin_again() {
  if (stream_ != nullptr) (void)zstd().begin(stream_);
  packed_begin_ = packed_end_ = 0;
  taken_ = position_ = 0;
  is_frame_over_ = false;
  is_sound_ = true;
}

Status Unpacker::fill(const ReadPacked& read) {
  const auto size = std::min(read_bytes_, packing_.bytes - taken_);
  BCP_ASSIGN_OR_RETURN(const int64_t got, read(packed_.get(), size, packing_.offset + taken_));
  if (got < size) return Status::make(Code::kCorrupt, text("the file ends after ", packing_.offset + taken_ + got));
  packed_begin_ = 0;
  packed_end_ = static_cast<size_t>(size);
  taken_ += size;
  return Status::ok();
}

base::Result<int64_t> Unpacker::unpack(uint8_t* to, int64_t size, const ReadPacked& read) {
  ZstdOut out{to, static_cast<size_t>(size), 0};
  while (out.position < out.size) {
    // zstd may hold bytes back that it has unpacked already.
    if (packed_begin_ == packed_end_ && taken_ < packing_.bytes) BCP_RETURN_IF_ERROR(fill(read));
    if (packed_begin_ == packed_end_ && is_frame_over_) break;
    ZstdIn in{packed_.get(), packed_end_, packed_begin_};
    const size_t before = out.position, read_before = in.position;
    const size_t left = zstd().unpack(stream_, &out, &in);
    packed_begin_ = in.position;
    if (zstd().is_error(left) != 0) {
      constexpr std::string_view kTooLarge = "Frame requires too much memory for decoding";
      const std::string_view name = zstd().error_name(left);
      return Status::make(
          name == kTooLarge ? Code::kUnsupported : Code::kCorrupt,
          text("zstd cannot unpack it after ", position_ + static_cast<int64_t>(out.position), " bytes: ", name));
    }
    is_frame_over_ = left == 0;
    if (out.position == before && in.position == read_before && taken_ == packing_.bytes) break;
  }
  position_ += static_cast<int64_t>(out.position);
  return static_cast<int64_t>(out.position);
}

Status Unpacker::check_end(const ReadPacked& read) {
  uint8_t behind = 0;
  const int64_t end = position_;
  BCP_ASSIGN_OR_RETURN(const int64_t more, unpack(&behind, 1, read));
  position_ = end;
  if (more == 0 && is_frame_over_) return Status::ok();
  return Status::make(Code::kCorrupt, more == 0
                                          ? text("what zstd has packed is cut off after ", packing_.bytes, " bytes")
                                          : text("zstd unpacks it to more than ", size(), " bytes"));
}

base::Result<int64_t> Unpacker::read_at(void* bytes, int64_t size, int64_t offset, const ReadPacked& read) {
  const base::MutexLock lock(mutex_);
  const int64_t wanted = std::max<int64_t>(0, std::min(size, packing_.unpacked_bytes - offset));
  if (wanted == 0) return 0;
  if (offset < position_ || !is_sound_) begin_again();
  is_sound_ = false;  // until all is well
  const auto go = [&](uint8_t* to, int64_t count) -> Status {
    BCP_ASSIGN_OR_RETURN(const int64_t got, unpack(to, count, read));
    if (got == count) return Status::ok();
    return Status::make(Code::kCorrupt, text("zstd unpacks it to ", position_, " bytes, wanted ", this->size()));
  };
  constexpr int64_t kSkippedBytes = 256 << 10;
  std::unique_ptr<uint8_t[]> skipped;
  while (position_ < offset) {
    if (skipped == nullptr) skipped.reset(new uint8_t[kSkippedBytes]);
    BCP_RETURN_IF_ERROR(go(skipped.get(), std::min(kSkippedBytes, offset - position_)));
  }
  BCP_RETURN_IF_ERROR(go(static_cast<uint8_t*>(bytes), wanted));
  if (position_ == packing_.unpacked_bytes) BCP_RETURN_IF_ERROR(check_end(read));
  is_sound_ = true;
  return wanted;
}

}  // namespace bytecheckpoint::io
