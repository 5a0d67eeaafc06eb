// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/shared_memory.h"

#include <utility>

namespace bytecheckpoint::engine {

base::Result<std::unique_ptr<SharedMemory>> SharedMemory::map(int64_t ring_bytes) {
  BCP_ASSIGN_OR_RETURN(auto ring, staging::SlotRing::map_shareable(ring_bytes));
  return std::unique_ptr<SharedMemory>(new SharedMemory(std::move(ring)));
}

base::Status SharedMemory::open(uint32_t rank, const staging::RingAddress& address) {
  BCP_ASSIGN_OR_RETURN(auto peer, staging::PeerRing::open(address));
  peers_[rank] = std::move(peer);
  return base::Status::ok();
}

const staging::PeerRing* SharedMemory::of_peer(uint32_t rank) const {
  const auto found = peers_.find(rank);
  return found == peers_.end() ? nullptr : found->second.get();
}

std::shared_ptr<staging::SlotRing> SharedMemory::lend() {
  if (is_back_.valid()) {
    is_back_.wait();
  } else {
    staging::BorrowedRing::free_idle();  // so that the process does not hold two
  }
  const auto given_back = std::make_shared<std::promise<void>>();
  is_back_ = given_back->get_future();
  return {ring_.get(), [ring = ring_, given_back](staging::SlotRing*) { given_back->set_value(); }};
}

}  // namespace bytecheckpoint::engine
