// SPDX-License-Identifier: Apache-2.0
// LD_PRELOAD puts this library before libc. It interrupts transfers to files, or does only part of them, which the
// standard allows for every call. Direct transfers stay aligned. And it creates the first tmp of a save, and says that it
// is missing, as sshfs can.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { kAlignment = 4096 };

static atomic_ulong calls;
static atomic_ulong disturbed;
static atomic_ulong denied;

unsigned long num_disturbed(void) {
  return atomic_load(&disturbed);
}

unsigned long num_denied(void) {
  return atomic_load(&denied);
}

// Returns how many of the `size` bytes to transfer, or -1 to interrupt the transfer.
static ssize_t part_of(size_t size, off_t offset, const void* bytes) {
  uint64_t draw = atomic_fetch_add(&calls, 1) * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  draw ^= draw >> 29;
  if (draw % 3 == 0) {
    atomic_fetch_add(&disturbed, 1);
    return -1;
  }
  if (size < 2 || draw % 3 == 1) return (ssize_t)size;
  size_t part = 1 + (draw >> 8) % (size - 1);
  const int is_aligned = ((uintptr_t)bytes | size | (uint64_t)offset) % kAlignment == 0;
  if (is_aligned) part = part / kAlignment * kAlignment;
  if (part == 0) return (ssize_t)size;
  atomic_fetch_add(&disturbed, 1);
  return (ssize_t)part;
}

#define TRANSFER(name, pointer)                                                \
  ssize_t name(int fd, pointer bytes, size_t size, off_t offset) {             \
    static ssize_t (*real)(int, pointer, size_t, off_t);                       \
    if (real == NULL) real = (ssize_t(*)(int, pointer, size_t, off_t))dlsym(RTLD_NEXT, #name); \
    const ssize_t part = part_of(size, offset, bytes);                         \
    if (part >= 0) return real(fd, bytes, (size_t)part, offset);               \
    errno = EINTR;                                                             \
    return -1;                                                                 \
  }

TRANSFER(pwrite, const void*)
TRANSFER(pwrite64, const void*)
TRANSFER(pread, void*)
TRANSFER(pread64, void*)

#define INTERRUPTED_ONCE(name, parameters, arguments)                  \
  int name parameters {                                                \
    static int(*real) parameters;                                      \
    static atomic_int times;                                           \
    if (real == NULL) real = (int(*) parameters)dlsym(RTLD_NEXT, #name); \
    if (atomic_fetch_add(&times, 1) % 2 == 1) return real arguments;   \
    atomic_fetch_add(&disturbed, 1);                                   \
    errno = EINTR;                                                     \
    return -1;                                                         \
  }

INTERRUPTED_ONCE(fallocate, (int fd, int mode, off_t offset, off_t size), (fd, mode, offset, size))
INTERRUPTED_ONCE(fallocate64, (int fd, int mode, off_t offset, off_t size), (fd, mode, offset, size))
INTERRUPTED_ONCE(ftruncate, (int fd, off_t size), (fd, size))
INTERRUPTED_ONCE(ftruncate64, (int fd, off_t size), (fd, size))

#define DENIED_ONCE(name)                                                       \
  int name(int directory, const char* path, int flags, ...) {                   \
    static int (*real)(int, const char*, int, ...);                             \
    if (real == NULL) real = (int (*)(int, const char*, int, ...))dlsym(RTLD_NEXT, #name); \
    va_list rest;                                                               \
    va_start(rest, flags);                                                      \
    const mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;             \
    va_end(rest);                                                               \
    const int fd = real(directory, path, flags, mode);                          \
    if (fd < 0 || !(flags & O_EXCL) || strstr(path, "/.metadata.") == NULL) return fd; \
    if (atomic_fetch_add(&denied, 1) > 0) return fd;                            \
    close(fd);                                                                  \
    errno = ENOENT;                                                             \
    return -1;                                                                  \
  }

DENIED_ONCE(openat)
DENIED_ONCE(openat64)
