// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/base/status.h"

namespace bytecheckpoint::format {

/// Reads JSON (RFC 8259) value by value, from bytes that may be damaged or hostile. Nothing is kept but the place.
///
///     object:  `object`; or begin_object, then next_key and one value, until next_key says that there is no more
///     array:   `array`; or begin_array, then one value, as long as next_element says that there is one
///
/// Every method fails with kCorrupt, with the offset in the text, if something else is there. After a failure the
/// reader must not be used. Memory: the strings that are returned, and one byte a nesting level.
class JsonReader {
 public:
  /// \param text  Must outlive the reader.
  explicit JsonReader(std::string_view text) : text_(text) {}

  /// Reads an object. \param read  Called with each key; reads its value.
  template <class Read>
  base::Status object(Read&& read) {
    BCP_RETURN_IF_ERROR(begin_object());
    for (std::string key;;) {
      BCP_ASSIGN_OR_RETURN(const bool is_there, next_key(&key));
      if (!is_there) return base::Status::ok();
      BCP_RETURN_IF_ERROR(read(key));
    }
  }
  /// Reads an array. \param read  Reads one element.
  template <class Read>
  base::Status array(Read&& read) {
    BCP_RETURN_IF_ERROR(begin_array());
    for (;;) {
      BCP_ASSIGN_OR_RETURN(const bool is_there, next_element());
      if (!is_there) return base::Status::ok();
      BCP_RETURN_IF_ERROR(read());
    }
  }

  base::Status begin_object() { return begin('{', "an object"); }
  base::Status begin_array() { return begin('[', "an array"); }
  /// Reads the next key of the innermost object; leaves the object, and returns false, at its end.
  base::Result<bool> next_key(std::string* key);
  /// Whether the innermost array has one more element; leaves the array if not.
  base::Result<bool> next_element() { return next(']', "an array"); }

  /// Returns a string as UTF-8, which is well-formed.
  base::Result<std::string> string();
  /// Returns an integer of at most 64 bits, without fraction and exponent.
  base::Result<int64_t> integer();
  base::Result<bool> boolean();
  /// Skips null. \returns false, and stays, if anything else is next.
  bool take_null();
  /// Reads any value and forgets it. \returns kCorrupt also for more than kMostLevels levels.
  base::Status skip();
  /// Fails if anything but white space follows.
  base::Status end();

  /// Offset of the next character, or of the fault after a failure.
  size_t position() const { return at_; }
  /// Makes a failure at an offset of the text.
  static base::Status fault(size_t position, std::string message);

  static constexpr size_t kMostLevels = 64;

 private:
  base::Status begin(char open, const char* what);
  base::Result<bool> next(char close, const char* what);
  base::Status skip_word(std::string_view word);
  base::Status skip_number();
  base::Status append_escape(std::string* out);
  base::Result<uint32_t> hex4();
  void skip_space();
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  base::Status wanted(std::string_view what) const;

  std::string_view text_;
  size_t at_ = 0;
  std::vector<bool> has_first_;  // a level each: whether its first element was read
};

}  // namespace bytecheckpoint::format
