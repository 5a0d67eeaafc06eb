// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace bytecheckpoint::base {

/// The kind of a failure. The bindings turn each kind into one exception class of `bytecheckpoint.errors`.
enum class Code : uint8_t {
  kOk = 0,
  kInvalidArgument,    // the caller asked for something impossible
  kNotFound,           // there is no checkpoint
  kExists,             // there is a checkpoint, which must not be replaced
  kBusy,               // another save into this path is running
  kSuperseded,         // this save lost its right to commit
  kChanged,            // a newer commit replaced what was being read
  kCorrupt,            // bytes on disk are not those that were written
  kVersion,            // written by a newer format version
  kUnsupported,        // valid, but not (yet) handled here
  kStorage,            // the file system refused; see sys_errno()
  kDurabilityUnknown,  // committed, but the directory could not be synced
  kCancelled,          // stopped from outside
  kStagingBusy,        // states that wait to be saved take all staging memory
  kStagingFull,        // a state is larger than the staging memory
  kDevice,             // an accelerator, or its driver, refused
};

/// Outcome of an operation: ok, or a failure with its kind, a message and an errno. The message says operation, path,
/// offset, and what was wanted and found.
///
/// Errors are values below the bindings: nothing here throws, prints or aborts. Callers add context on the way up with
/// `with_context` and never replace the message.
class [[nodiscard]] Status {
 public:
  Status() = default;

  static Status ok() { return {}; }
  static Status make(Code code, std::string message, std::string path = {}, int sys_errno = 0) {
    Status status;
    status.code_ = code;
    status.message_ = std::move(message);
    status.path_ = std::move(path);
    status.sys_errno_ = sys_errno;
    return status;
  }
  /// Makes a kStorage failure: the file system refused `operation`. Message: `operation(path, detail): text of the
  /// errno`.
  static Status storage(std::string_view operation, const std::string& path, std::string_view detail, int sys_errno);

  bool is_ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  const std::string& path() const { return path_; }
  int sys_errno() const { return sys_errno_; }

  /// The range of the file that is in doubt, in bytes; both are -1 if it is not known.
  int64_t offset() const { return offset_; }
  int64_t num_bytes() const { return num_bytes_; }

  /// Puts `context` before the message: `context: message`. Does nothing if ok.
  Status with_context(std::string_view context) &&;
  /// Sets the range of the file that is in doubt. Does nothing if ok.
  Status at(int64_t offset, int64_t num_bytes) &&;
  /// Names the file that was read: sets the path, and the message becomes `read(path, offset=.., .. bytes): message`.
  /// Does nothing if ok.
  Status in_file(const std::string& path) &&;

 private:
  Code code_ = Code::kOk;
  int sys_errno_ = 0;
  int64_t offset_ = -1;
  int64_t num_bytes_ = -1;
  std::string message_;
  std::string path_;
};

/// A value, or the Status that says why there is none. `value()` may be called only if `is_ok()`.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}         // NOLINT: implicit on purpose, as in `return value;`
  Result(Status status) : state_(std::move(status)) {}  // NOLINT
  bool is_ok() const { return std::holds_alternative<T>(state_); }
  T& value() { return std::get<T>(state_); }
  const T& value() const { return std::get<T>(state_); }
  Status status() const { return is_ok() ? Status::ok() : std::get<Status>(state_); }

 private:
  std::variant<T, Status> state_;
};

/// Joins strings and numbers to one text, for messages: `text("offset=", 12)` is `offset=12`.
template <class... Parts>
std::string text(const Parts&... parts);

namespace internal {
inline void append(std::string& out, std::string_view part) {
  out.append(part);
}
inline void append(std::string& out, const char* part) {
  out.append(part);
}
inline void append(std::string& out, const std::string& part) {
  out.append(part);
}
template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
void append(std::string& out, Number part) {
  out.append(std::to_string(part));
}
}  // namespace internal

template <class... Parts>
std::string text(const Parts&... parts) {
  std::string out;
  (internal::append(out, parts), ...);
  return out;
}

}  // namespace bytecheckpoint::base

/// `BCP_RETURN_IF_ERROR(f());` returns the Status of f() from the calling function unless it is ok.
#define BCP_RETURN_IF_ERROR(expression)                        \
  do {                                                         \
    ::bytecheckpoint::base::Status bcp_status_ = (expression); \
    if (!bcp_status_.is_ok()) return bcp_status_;              \
  } while (false)

#define BCP_CONCAT_INNER_(a, b) a##b
#define BCP_CONCAT_(a, b) BCP_CONCAT_INNER_(a, b)
/// `BCP_ASSIGN_OR_RETURN(auto x, f());` declares or assigns x from the Result of f(), or returns its Status. It expands
/// to several statements, so it needs braces after an `if`.
#define BCP_ASSIGN_OR_RETURN(target, expression)                                                       \
  auto BCP_CONCAT_(bcp_result_, __LINE__) = (expression);                                              \
  if (!BCP_CONCAT_(bcp_result_, __LINE__).is_ok()) return BCP_CONCAT_(bcp_result_, __LINE__).status(); \
  target = std::move(BCP_CONCAT_(bcp_result_, __LINE__).value())
