// SPDX-License-Identifier: Apache-2.0
#include "csrc/base/content_hash.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>

#include "csrc/base/bytes.h"
#include "csrc/base/mutex.h"

namespace bytecheckpoint::base {
namespace {

/// The functions of the library that are used, as its header declares them.
struct Xxh3 {
  ContentHash (*hash)(const void*, size_t);
  int (*update)(void*, const void*, size_t);
  void* (*create)();
  int (*free)(void*);
  int (*reset)(void*);
  ContentHash (*digest)(const void*);
};

std::atomic<const Xxh3*> loaded{nullptr};

const Xxh3& xxh3() {
  return *loaded.load(std::memory_order_acquire);
}

template <class Function>
bool find(void* library, const char* name, Function* found) {
  *found = reinterpret_cast<Function>(::dlsym(library, name));
  return *found != nullptr;
}

}  // namespace

Status load_content_hash(const std::string& library) {
  static Mutex mutex;
  const MutexLock lock(mutex);
  if (has_content_hash()) return Status::ok();
  void* const handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return Status::make(Code::kUnsupported, ::dlerror());
  static Xxh3 found;
  // Where a library has those that use what the processor can, they are twice as fast.
  const bool is_fast =
      find(handle, "XXH3_128bits_dispatch", &found.hash) && find(handle, "XXH3_128bits_update_dispatch", &found.update);
  const bool has_both =
      is_fast || (find(handle, "XXH3_128bits", &found.hash) && find(handle, "XXH3_128bits_update", &found.update));
  const bool has_all =
      has_both && find(handle, "XXH3_createState", &found.create) && find(handle, "XXH3_freeState", &found.free) &&
      find(handle, "XXH3_128bits_reset", &found.reset) && find(handle, "XXH3_128bits_digest", &found.digest);
  if (!has_all) return Status::make(Code::kUnsupported, text(library, " has no XXH3 of 128 bits"));
  // XXH3-128 of nothing, low half first.
  constexpr ContentHash kOfNothing{0x6001C324468D497F, 0x99AA06D3014798D8};
  if (found.hash("", 0) != kOfNothing) {
    return Status::make(Code::kUnsupported, text(library, ": its XXH3 of 128 bits is not the one that was released"));
  }
  loaded.store(&found, std::memory_order_release);
  return Status::ok();
}

bool has_content_hash() {
  return loaded.load(std::memory_order_acquire) != nullptr;
}

ContentHash hash_stretch(const void* bytes, size_t size) {
  return xxh3().hash(bytes, size);
}

ContentHash join_stretches(const ContentHash* first, size_t count) {
  if (count == 0) return hash_stretch("", 0);
  if (count == 1) return *first;
  std::string all;
  all.reserve(count * kEncodedHashBytes);
  for (size_t i = 0; i < count; ++i) encode_hash(first[i], &all);
  return hash_stretch(all.data(), all.size());
}

ContentHasher::ContentHasher() : state_(xxh3().create()) {
  (void)xxh3().reset(state_);
}

ContentHasher::~ContentHasher() {
  (void)xxh3().free(state_);
}

void ContentHasher::add(const void* bytes, size_t size) {
  for (const auto* next = static_cast<const char*>(bytes); size > 0;) {
    const auto part = std::min(size, static_cast<size_t>(kHashedBytes - in_stretch_));
    (void)xxh3().update(state_, next, part);
    next += part;
    size -= part;
    in_stretch_ += static_cast<int64_t>(part);
    if (in_stretch_ == kHashedBytes) end_stretch();
  }
}

void ContentHasher::end_stretch() {
  stretches_.push_back(xxh3().digest(state_));
  (void)xxh3().reset(state_);
  in_stretch_ = 0;
}

ContentHash ContentHasher::end() {
  if (in_stretch_ > 0) end_stretch();
  const ContentHash hash = join_stretches(stretches_.data(), stretches_.size());
  stretches_.clear();
  return hash;
}

void encode_hash(const ContentHash& hash, std::string* out) {
  ByteWriter bytes;
  bytes.u64(hash.low);
  bytes.u64(hash.high);
  out->append(bytes.take());
}

ContentHash decode_hash(std::string_view bytes) {
  ByteReader in(bytes);
  const uint64_t low = in.u64(), high = in.u64();
  return {low, high};
}

}  // namespace bytecheckpoint::base
