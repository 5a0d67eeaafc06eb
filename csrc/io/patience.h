// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "csrc/base/status.h"

namespace bytecheckpoint::io {

/// The failure of a call that storage has not answered: kStorage with ETIMEDOUT.
base::Status no_answer(std::string_view operation, const std::string& path, double timeout_s);

/// What an owner of files asks of storage that may never answer: a network mount whose server is gone, a FUSE mount
/// whose program hangs. Nothing ends such a call, so it is made in a thread, and the thread is left behind with it.
///
/// One thread for all calls of an owner, started by the first. Once one of them has taken too long nothing more is
/// asked: `run` fails at once, and the destructor waits for what was left behind. An owner that must not wait there is
/// deleted by `DeletePatiently`.
class Patience {
 public:
  /// \param timeout_s  Of silence, after which storage is given up. 0: calls are made by who asks, and take what they
  /// take.
  explicit Patience(double timeout_s);
  ~Patience();
  Patience(const Patience&) = delete;
  Patience& operator=(const Patience&) = delete;

  /// Any thread; one call after the other. What was asked with too little patience before is no longer asked.
  ///
  /// \param work  Gives a Status or a Result. It may outlive this call: it uses what it has copied and what the owner
  /// of this object owns, never what is its caller's.
  /// \param late  Run behind `work`, in its thread, if that ends when it has been given up.
  /// \returns what `work` does; kStorage with ETIMEDOUT if that takes too long.
  template <class Work>
  auto run(std::string_view operation, const std::string& path, Work work, std::function<void()> late = {})
      -> decltype(work()) {
    if (!is_bounded()) return work();
    auto made = std::make_unique<CallOf<Work>>(std::move(work), std::move(late));
    CallOf<Work>* const typed = made.get();
    std::shared_ptr<Call> call = std::move(made);
    base::Status waited = wait_for(operation, path, &call);
    if (!waited.is_ok()) return waited;
    return std::move(*typed->outcome);
  }

  /// From inside `work` that asks many things: one more was answered, and the time begins anew.
  void answered();
  /// From now on waits no longer than this. No effect on one that waits for ever.
  void shorten(double timeout_s);
  /// Has storage been given up?
  bool is_exhausted() const;

 private:
  struct Call {
    explicit Call(std::function<void()> late) : late(std::move(late)) {}
    virtual ~Call() = default;
    virtual void make() = 0;
    const std::function<void()> late;
    bool is_done = false;  // only one of these
    bool is_given_up = false;
  };
  template <class Work>
  struct CallOf : Call {
    CallOf(Work work, std::function<void()> late) : Call(std::move(late)), work(std::move(work)) {}
    void make() override { outcome.emplace(work()); }
    Work work;
    std::optional<decltype(std::declval<Work&>()())> outcome;
  };
  struct Server;

  bool is_bounded() const;
  /// \param call  Reset on failure: what it owns is then freed by the thread, since that may take as long.
  base::Status wait_for(std::string_view operation, const std::string& path, std::shared_ptr<Call>* call);

  std::unique_ptr<Server> server_;  // none if it waits for ever
};

/// Runs `work` in a thread of its own, and waits for it a second at most. The rest of it happens when it can.
///
/// The exception from the rule that no thread is detached: a thread that waits for storage can be ended by nobody, and
/// whoever joined it would wait as long. It owns all that it uses, and a process that exits meanwhile takes it along.
void end_patiently(std::function<void()> work);

/// Deletes what has files open or may have threads that wait for storage: closing and joining may take for ever. Memory
/// and descriptors come back when storage answers.
struct DeletePatiently {
  bool is_bounded = true;  // false: deletes at once, whatever that takes
  template <class T>
  void operator()(T* object) const {
    if (!is_bounded) {
      delete object;
    } else {
      end_patiently([object] { delete object; });
    }
  }
};

/// `work` once, with a patience of its own: see `Patience::run`.
template <class Work>
auto run_patiently(double timeout_s, std::string_view operation, const std::string& path, Work work)
    -> decltype(work()) {
  auto patience = std::make_unique<Patience>(timeout_s);
  auto outcome = patience->run(operation, path, std::move(work));
  if (patience->is_exhausted()) end_patiently([left = patience.release()] { delete left; });
  return outcome;
}

}  // namespace bytecheckpoint::io
