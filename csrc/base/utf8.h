// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace bytecheckpoint::base {

/// Returns whether `text` is well-formed UTF-8: no surrogates, no overlong forms, nothing beyond U+10FFFF. NUL is a
/// character. Only well-formed text can stand in an error message, because Python makes a str of the message.
bool is_utf8(std::string_view text);

/// Takes each byte as the Latin-1 character of that number and returns the text as UTF-8. Accepts any bytes.
std::string latin1_to_utf8(std::string_view bytes);
/// Does the reverse of `latin1_to_utf8`.
/// \param utf8  Well-formed.
/// \returns false if `utf8` has characters beyond U+00FF; `*bytes` then has no meaning.
bool utf8_to_latin1(std::string_view utf8, std::string* bytes);

}  // namespace bytecheckpoint::base
