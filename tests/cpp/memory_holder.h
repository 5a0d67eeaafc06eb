// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/base/mutex.h"
#include "csrc/base/status.h"
#include "csrc/io/object_store.h"

namespace bytecheckpoint::test {

/// Keeps descriptors, as a holder does.
class MemoryHolder : public io::ObjectStore, public io::MemoryObjects {
 public:
  ~MemoryHolder() override {
    for (const auto& [name, fd] : kept_) ::close(fd);
  }
  base::Result<Object> open(const std::string&) override { return unasked(); }
  base::Result<int64_t> read(const std::string&, const Object&, uint8_t*, int64_t, int64_t) override {
    return unasked();
  }
  base::Result<std::unique_ptr<io::Upload>> create(const std::string&) override { return unasked(); }
  base::Result<std::vector<std::string>> list(const std::string&) override { return unasked(); }
  io::MemoryObjects* in_memory() override { return this; }

  base::Result<int> descriptor(const std::string& name) override {
    base::MutexLock lock(mutex_);
    const auto found = kept_.find(name);
    if (found == kept_.end()) return base::Status::storage("open", name, "", ENOENT);
    return ::dup(found->second);
  }
  base::Result<int> spare(const std::string&) override { return std::exchange(spare_fd, -1); }
  base::Status reserve(const std::string& name, int64_t bytes, int64_t there) override {
    return bytes - there > most_bytes ? base::Status::storage("reserve", name, "", ENOMEM) : base::Status::ok();
  }
  base::Status keep(const std::string& name, int fd) override {
    base::MutexLock lock(mutex_);
    kept_[name] = ::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDONLY | O_CLOEXEC);
    return base::Status::ok();
  }

  int64_t most_bytes = 1 << 20;
  int spare_fd = -1;

 private:
  static base::Status unasked() {
    return base::Status::make(base::Code::kInvalidArgument, "nobody asks this of memory");
  }

  base::Mutex mutex_;
  std::map<std::string, int> kept_ BCP_GUARDED_BY(mutex_);
};

inline constexpr char kHeldUrl[] = "held://run";

/// Makes a new one the store of kHeldUrl.
inline std::shared_ptr<MemoryHolder> registered_holder() {
  auto holder = std::make_shared<MemoryHolder>();
  io::register_store(kHeldUrl, holder);
  return holder;
}

}  // namespace bytecheckpoint::test
