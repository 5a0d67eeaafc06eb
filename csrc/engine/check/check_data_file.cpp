// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/check/check_data_file.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <vector>

#include "csrc/base/mutex.h"
#include "csrc/base/named_thread.h"
#include "csrc/engine/open/source_file.h"
#include "csrc/format/data_file.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::engine {

using base::Status;

base::Status check_data_file(int fd, const std::string& path, int num_threads) {
  const int own_fd = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own_fd < 0) return Status::storage("fcntl", path, "F_DUPFD_CLOEXEC", errno);
  io::File file(io::DiskFile(io::Descriptor(own_fd, path, /*direct=*/false)));
  BCP_ASSIGN_OR_RETURN(const auto source, SourceFile::of_one_file(&file));
  std::atomic<int64_t> next{0};
  base::Mutex mutex;
  Status outcome;
  base::work_together("bcp-check", static_cast<size_t>(std::max(num_threads, 1)), [&] {
    std::vector<uint8_t> block(format::kBlockBytes);
    for (int64_t at = next.fetch_add(format::kBlockBytes); at < source->end_of_records;
         at = next.fetch_add(format::kBlockBytes)) {
      const int64_t bytes = std::min(format::kBlockBytes, source->end_of_records - at);
      Status checked = file.read_at(block.data(), bytes, at, bytes).status();
      if (checked.is_ok()) checked = source->check_blocks(block.data(), at, bytes);
      if (checked.is_ok()) continue;
      next = source->end_of_records;
      const base::MutexLock lock(mutex);
      if (outcome.is_ok()) outcome = std::move(checked);
    }
  });
  return outcome;
}

}  // namespace bytecheckpoint::engine
