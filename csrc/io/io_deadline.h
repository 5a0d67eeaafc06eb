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

/// Returns the error of a call that the storage has not answered: kStorage with ETIMEDOUT.
base::Status no_answer(std::string_view operation, const std::string& path, double timeout_s);

/// Makes calls to storage that may never answer, like a network mount whose server is gone, or a FUSE mount whose
/// program hangs. Nothing can end such a call. So a thread makes it, and if it takes too long, the thread is left
/// behind with it.
///
///     caller        run(work) ----- waits, at most timeout_s -----> the result, or kStorage with ETIMEDOUT
///                       |                                               ^
///     its thread        +---> work() -----------------------------------+
///                             (each `answered` in it restarts the time)
///                             then late(), if the caller has given up meanwhile
///
/// There is one thread for all calls of an owner, started by the first call. Once a call has taken too long, nothing
/// more is asked of the storage: `run` fails at once. The destructor waits for the call that was left behind: an owner
/// that must not wait is deleted by `DeleteInBackground`. Thread-safe. In a forked child there is no such thread, and
/// calls have no limit.
class IoDeadline {
 public:
  /// \param timeout_s  How long the storage may not answer. 0: no limit; the caller's thread makes the calls.
  explicit IoDeadline(double timeout_s);
  ~IoDeadline();
  IoDeadline(const IoDeadline&) = delete;
  IoDeadline& operator=(const IoDeadline&) = delete;

  /// Runs `work` and waits for it. Any thread may call this; the calls run one after the other. Calls that are still
  /// waiting for their turn when the storage is given up fail without being run.
  ///
  /// \param work  Returns a Status or a Result. It may run on after this call has returned, so it may use only copies,
  /// and what the owner of this object owns; never what belongs to its caller.
  /// \param late  Run after `work`, in the same thread, if `work` ends after its caller has given up.
  /// \returns what `work` returns; kStorage with ETIMEDOUT if that takes too long.
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

  /// Restarts the time. For `work` that makes many calls to the storage: it calls this after each answer.
  void answered();
  /// Limits the time to `timeout_s` from now on. No effect if there is no limit.
  void shorten(double timeout_s);
  /// Whether the storage did not answer in time, so that `run` now fails at once.
  bool is_exhausted() const;

 private:
  struct Call {
    explicit Call(std::function<void()> late) : late(std::move(late)) {}
    virtual ~Call() = default;
    virtual void make() = 0;
    const std::function<void()> late;
    bool is_done = false;  // at most one of these two is true
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
  /// \param call  Reset on failure. The thread then frees what the call owns, since freeing it may take as long.
  base::Status wait_for(std::string_view operation, const std::string& path, std::shared_ptr<Call>* call);

  std::unique_ptr<Server> server_;  // null: there is no limit of time
};

/// Runs `work` in a thread of its own, and waits for it for a second at most. If it takes longer, it goes on in the
/// background.
///
/// This is the exception from the rule that no thread is detached: nothing can end a thread that waits for storage, and
/// joining it would take as long. The thread owns all that it uses. If the process exits meanwhile, the thread ends
/// with it.
void run_in_background(std::function<void()> work);

/// A deleter for objects that have open files, or threads that may wait for storage: closing and joining may take for
/// ever. It deletes by `run_in_background`; memory and descriptors come back when the storage answers.
struct DeleteInBackground {
  bool is_bounded = true;  // false: deletes at once, however long that takes
  template <class T>
  void operator()(T* object) const {
    if (!is_bounded) {
      delete object;
    } else {
      run_in_background([object] { delete object; });
    }
  }
};

/// Runs `work` once, with a deadline of its own. See `IoDeadline::run`.
template <class Work>
auto run_with_deadline(double timeout_s, std::string_view operation, const std::string& path, Work work)
    -> decltype(work()) {
  auto deadline = std::make_unique<IoDeadline>(timeout_s);
  auto outcome = deadline->run(operation, path, std::move(work));
  if (deadline->is_exhausted()) run_in_background([left = deadline.release()] { delete left; });
  return outcome;
}

}  // namespace bytecheckpoint::io
