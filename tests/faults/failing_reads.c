// SPDX-License-Identifier: Apache-2.0
// LD_PRELOAD puts this library before libc. It makes one read fail with EIO, whichever thread makes that read.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/types.h>

static atomic_long made;
static atomic_long failing;

// Starts to count reads again from 1, and makes the read of this number fail. With 0 none fails.
void fail_read(long number) {
  atomic_store(&failing, number);
  atomic_store(&made, 0);
}

long num_reads(void) {
  return atomic_load(&made);
}

#define READ(name)                                                             \
  ssize_t name(int fd, void* bytes, size_t size, off_t offset) {               \
    static ssize_t (*real)(int, void*, size_t, off_t);                         \
    if (real == NULL) real = (ssize_t(*)(int, void*, size_t, off_t))dlsym(RTLD_NEXT, #name); \
    if (atomic_fetch_add(&made, 1) + 1 != atomic_load(&failing)) return real(fd, bytes, size, offset); \
    errno = EIO;                                                               \
    return -1;                                                                 \
  }

READ(pread)
READ(pread64)
