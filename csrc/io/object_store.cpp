// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/object_store.h"

#include <algorithm>
#include <deque>
#include <unordered_map>
#include <utility>

#include "csrc/base/mutex.h"
#include "csrc/base/per_process.h"

namespace bytecheckpoint::io {
namespace {

constexpr size_t kMaxStores = 1000;

struct Registry {
  base::Mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<ObjectStore>> stores BCP_GUARDED_BY(mutex);
  std::deque<std::string> oldest_first BCP_GUARDED_BY(mutex);
};

Registry& registry() {
  return base::of_process<Registry>();
}

}  // namespace

bool is_url(const std::string& directory) {
  return directory.find("://") != std::string::npos;
}

void register_store(const std::string& url, std::shared_ptr<ObjectStore> store) {
  std::shared_ptr<ObjectStore> before, oldest;  // are destroyed without the mutex, because that may take the GIL
  Registry& all = registry();
  base::MutexLock lock(all.mutex);
  if (all.stores.find(url) == all.stores.end()) all.oldest_first.push_back(url);
  before = std::exchange(all.stores[url], std::move(store));
  if (all.oldest_first.size() > kMaxStores) {
    oldest = std::move(all.stores[all.oldest_first.front()]);
    all.stores.erase(all.oldest_first.front());
    all.oldest_first.pop_front();
  }
}

base::Result<StorePlace> place_in_store(const std::string& url) {
  Registry& all = registry();
  base::MutexLock lock(all.mutex);
  const size_t host = url.find("://") + 3;
  for (size_t end = url.size(); end != std::string::npos && end > host; end = url.rfind('/', end - 1)) {
    const auto found = all.stores.find(url.substr(0, end));
    if (found != all.stores.end()) return StorePlace{found->second, url.substr(std::min(end + 1, url.size()))};
  }
  return base::Status::make(base::Code::kUnsupported, base::text("open(", url, "): this call does not take a URL"),
                            url);
}

}  // namespace bytecheckpoint::io
