// SPDX-License-Identifier: Apache-2.0
#include "csrc/io/io_deadline.h"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <sstream>
#include <system_error>
#include <thread>

#include "csrc/base/mutex.h"
#include "csrc/base/named_thread.h"

namespace bytecheckpoint::io {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kWaitForEnd(1);
constexpr double kMaxTimeoutS = 1e9;  // the largest that can be added to a time without overflow

Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, kMaxTimeoutS)));
}

}  // namespace

base::Status no_answer(std::string_view operation, const std::string& path, double timeout_s) {
  std::ostringstream seconds;
  seconds << timeout_s;
  return base::Status::make(base::Code::kStorage,
                            base::text(operation, "(", path, "): the storage has not answered for ", seconds.str(),
                                       " s (Config.io_timeout_s)"),
                            path, ETIMEDOUT);
}

/// What the thread uses. It is apart, because a forked child has neither the thread, nor can it destroy what somebody
/// seems to wait on: there it is leaked.
struct IoDeadline::Server {
  explicit Server(double timeout_s) : timeout_s(timeout_s) {}

  void serve();

  const pid_t owner = ::getpid();
  std::atomic<bool> is_exhausted{false};
  base::Mutex mutex;
  double timeout_s BCP_GUARDED_BY(mutex);
  Clock::time_point last_answer BCP_GUARDED_BY(mutex);
  bool is_serving BCP_GUARDED_BY(mutex) = false;
  bool is_ending BCP_GUARDED_BY(mutex) = false;
  std::deque<std::shared_ptr<Call>> calls BCP_GUARDED_BY(mutex);
  std::condition_variable called, ended;
  std::thread thread;
};

void IoDeadline::Server::serve() {
  base::MutexLock lock(mutex);
  for (;;) {
    is_serving = false;
    called.wait(lock, [this] { return is_ending || !calls.empty(); });
    if (calls.empty()) return;
    std::shared_ptr<Call> call = std::move(calls.front());
    calls.pop_front();
    is_serving = true;
    if (!call->is_given_up) {
      lock.unlock();
      call->make();
      lock.lock();
      last_answer = Clock::now();
      call->is_done = !call->is_given_up;
    }
    const bool is_late = call->is_given_up;
    ended.notify_all();
    lock.unlock();
    if (is_late && call->late) call->late();
    call.reset();
    lock.lock();
  }
}

IoDeadline::IoDeadline(double timeout_s) : server_(timeout_s > 0 ? std::make_unique<Server>(timeout_s) : nullptr) {}

IoDeadline::~IoDeadline() {
  if (server_ == nullptr) return;
  if (::getpid() != server_->owner) {
    (void)server_.release();  // leaked: in the child, somebody seems to wait on its condition for ever
    return;
  }
  {
    base::MutexLock lock(server_->mutex);
    server_->is_ending = true;
    server_->called.notify_all();
  }
  if (server_->thread.joinable()) server_->thread.join();
}

bool IoDeadline::is_bounded() const {
  return server_ != nullptr && ::getpid() == server_->owner;
}

bool IoDeadline::is_exhausted() const {
  return server_ != nullptr && server_->is_exhausted;
}

void IoDeadline::answered() {
  if (!is_bounded()) return;
  base::MutexLock lock(server_->mutex);
  server_->last_answer = Clock::now();
}

void IoDeadline::shorten(double timeout_s) {
  if (!is_bounded()) return;
  base::MutexLock lock(server_->mutex);
  server_->timeout_s = std::min(server_->timeout_s, timeout_s);
  server_->ended.notify_all();
}

base::Status IoDeadline::wait_for(std::string_view operation, const std::string& path, std::shared_ptr<Call>* call) {
  Server& s = *server_;
  base::MutexLock lock(s.mutex);
  if (!s.is_exhausted) {
    if (!s.thread.joinable()) s.thread = base::named_thread("bcp-io-deadline", [&s] { s.serve(); });
    if (!s.is_serving && s.calls.empty()) s.last_answer = Clock::now();
    s.calls.push_back(*call);
    s.called.notify_one();
    while (!(*call)->is_done && !s.is_exhausted) {
      const auto end = s.last_answer + duration_of(s.timeout_s);
      s.ended.wait_until(lock, end);
      if (!(*call)->is_done && Clock::now() >= s.last_answer + duration_of(s.timeout_s)) s.is_exhausted = true;
    }
    s.ended.notify_all();  // wakes calls that wait behind this one
    if ((*call)->is_done) return base::Status::ok();
  }
  (*call)->is_given_up = true;
  call->reset();
  return no_answer(operation, path, s.timeout_s);
}

void run_in_background(std::function<void()> work) {
  struct Ending {
    base::Mutex mutex;
    std::condition_variable ended;
    bool has_ended = false;
  };
  const auto ending = std::make_shared<Ending>();
  const auto end = [ending, work]() mutable {
    work();
    work = nullptr;
    base::MutexLock lock(ending->mutex);
    ending->has_ended = true;
    ending->ended.notify_all();
  };
  try {
    base::named_thread("bcp-ending", end).detach();
  } catch (const std::system_error&) {
    return work();  // no thread can be started: runs it here
  }
  base::MutexLock lock(ending->mutex);
  ending->ended.wait_for(lock, kWaitForEnd, [&] { return ending->has_ended; });
}

}  // namespace bytecheckpoint::io
