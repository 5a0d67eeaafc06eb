// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace bytecheckpoint::base {

/// Is `text` well-formed UTF-8: no surrogates, no overlong forms, nothing beyond U+10FFFF? NUL is a character.
/// What is not cannot stand in a message, since Python makes a str of that.
bool is_utf8(std::string_view text);

/// Any bytes, each taken for the character of its number, as UTF-8.
std::string latin1_to_utf8(std::string_view bytes);
/// Back. `utf8` is well-formed.
/// \returns false, leaving `*bytes` anyhow, if it has characters beyond U+00FF.
bool utf8_to_latin1(std::string_view utf8, std::string* bytes);

}  // namespace bytecheckpoint::base
