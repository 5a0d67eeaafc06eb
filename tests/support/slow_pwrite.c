// SPDX-License-Identifier: Apache-2.0
// A library to preload: each large pwrite takes SLOW_PWRITE_MS milliseconds longer, as on a disk that is slow.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

static const size_t kLeastBytes = 1 << 20;

ssize_t pwrite64(int fd, const void* from, size_t size, off64_t offset) {
  static ssize_t (*real)(int, const void*, size_t, off64_t);
  if (real == NULL) real = dlsym(RTLD_NEXT, "pwrite64");
  const char* delay_ms = getenv("SLOW_PWRITE_MS");
  if (delay_ms != NULL && size >= kLeastBytes) usleep((useconds_t)atoi(delay_ms) * 1000);
  return real(fd, from, size, offset);
}

ssize_t pwrite(int fd, const void* from, size_t size, off_t offset) { return pwrite64(fd, from, size, offset); }
