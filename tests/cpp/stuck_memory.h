// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace bytecheckpoint::test {

/// Memory that no system call can read or write: a call that copies from it or to it hangs until `let_go`, like a call
/// to storage that does not answer.
class StuckMemory {
 public:
  explicit StuckMemory(size_t bytes) : bytes_(bytes) {
    void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return;
    memory_ = static_cast<uint8_t*>(memory);
    fd_ = static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC));
    uffdio_api api{};
    api.api = UFFD_API;
    uffdio_register range{};
    range.range = {reinterpret_cast<uintptr_t>(memory), bytes};
    range.mode = UFFDIO_REGISTER_MODE_MISSING;
    is_stuck_ = fd_ >= 0 && ::ioctl(fd_, UFFDIO_API, &api) == 0 && ::ioctl(fd_, UFFDIO_REGISTER, &range) == 0;
  }
  ~StuckMemory() {
    let_go();
    if (memory_ != nullptr) ::munmap(memory_, bytes_);
  }
  StuckMemory(const StuckMemory&) = delete;
  StuckMemory& operator=(const StuckMemory&) = delete;

  /// False if the system does not let this user have such memory.
  bool is_stuck() const { return is_stuck_; }
  uint8_t* get() const { return memory_; }
  /// Lets hanging calls continue. They find zeros.
  void let_go() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  const size_t bytes_;
  uint8_t* memory_ = nullptr;
  int fd_ = -1;
  bool is_stuck_ = false;
};

}  // namespace bytecheckpoint::test
