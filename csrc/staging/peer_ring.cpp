// SPDX-License-Identifier: Apache-2.0
#include "csrc/staging/peer_ring.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

namespace bytecheckpoint::staging {
namespace {

using base::Status;
using base::text;

constexpr const char* kWhat = "ring of another process";

base::Result<std::unique_ptr<Pages>> map_at(int fd, const RingAddress& address, const std::string& path) {
  struct ::stat found{};
  if (::fstat(fd, &found) != 0) return Status::storage("fstat", path, kWhat, errno);
  const auto device = static_cast<int64_t>(found.st_dev);
  const auto inode = static_cast<int64_t>(found.st_ino);
  // The size must be right, too: reading behind the end of a file would end the process.
  if (device != address.device || inode != address.inode || found.st_size != address.num_slots * kSlotBytes) {
    return Status::make(base::Code::kNotFound,
                        text("open(", path, "): wanted the memory ", address.device, ":", address.inode, " of ",
                             address.num_slots, " slots, got ", device, ":", inode, " of ", found.st_size, " bytes"),
                        path);
  }
  return Pages::map_shared(fd, found.st_size, kWhat, Pages::Access::kRead);
}

}  // namespace

base::Result<RingAddress> address_of(const SlotRing& ring) {
  struct ::stat found{};
  if (ring.fd() < 0) return Status::make(base::Code::kInvalidArgument, "ring of slots: it cannot be shared");
  if (::fstat(ring.fd(), &found) != 0) return Status::storage("fstat", "ring of slots", "", errno);
  return RingAddress{::getpid(), ring.fd(), static_cast<int64_t>(found.st_dev), static_cast<int64_t>(found.st_ino),
                     ring.num_slots()};
}

base::Result<std::unique_ptr<PeerRing>> PeerRing::open(const RingAddress& address) {
  const std::string path = text("/proc/", address.pid, "/fd/", address.fd);
  if (address.num_slots <= 0 || address.num_slots > kMaxRingBytes / kSlotBytes) {
    return Status::make(base::Code::kNotFound, text("open(", path, "): no ring has ", address.num_slots, " slots"));
  }
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return Status::storage("open", path, kWhat, errno);
  auto pages = map_at(fd, address, path);
  ::close(fd);
  if (!pages.is_ok()) return pages.status();
  return std::unique_ptr<PeerRing>(new PeerRing(std::move(pages.value())));
}

}  // namespace bytecheckpoint::staging
