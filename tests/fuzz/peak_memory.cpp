// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/peak_memory.h"

#include "csrc/base/status.h"

#if defined(__SANITIZE_ADDRESS__)
#define BCP_COUNTS 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define BCP_COUNTS 1
#endif
#endif

#ifdef BCP_COUNTS
// Declared in <sanitizer/allocator_interface.h>, which clang's runtime has and gcc's has not.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void*, size_t),
                                                         void (*free_hook)(const volatile void*));
extern "C" size_t __sanitizer_get_allocated_size(const volatile void* memory);
#endif

namespace bytecheckpoint::fuzz {
namespace {

thread_local bool is_counting = false;
thread_local int64_t live_bytes = 0;
thread_local int64_t peak_bytes = 0;

#ifdef BCP_COUNTS
void on_malloc(const volatile void*, size_t bytes) {
  if (!is_counting) return;
  live_bytes += static_cast<int64_t>(bytes);
  if (live_bytes > peak_bytes) peak_bytes = live_bytes;
}

void on_free(const volatile void* memory) {
  if (!is_counting || memory == nullptr) return;
  live_bytes -= static_cast<int64_t>(__sanitizer_get_allocated_size(memory));
}

void install_hooks() {
  static const int installed = __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free);
  (void)installed;
}
#else
void install_hooks() {}
#endif

}  // namespace

PeakMemory::PeakMemory(size_t input_bytes, int64_t max_times, int64_t free_bytes)
    : limit_(max_times * static_cast<int64_t>(input_bytes) + free_bytes) {
  install_hooks();
  live_bytes = peak_bytes = 0;
  is_counting = true;
}

PeakMemory::~PeakMemory() {
  is_counting = false;
}

std::string PeakMemory::stop() {
  is_counting = false;
  if (peak_bytes <= limit_) return {};
  return base::text("takes ", peak_bytes, " bytes of memory, wanted at most ", limit_);
}

}  // namespace bytecheckpoint::fuzz
