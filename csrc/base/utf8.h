// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace bytecheckpoint::base {

/// Is `text` well-formed UTF-8: no surrogates, no overlong forms, nothing beyond U+10FFFF? NUL is a character.
/// What is not cannot stand in a message, since Python makes a str of that.
bool is_utf8(std::string_view text);

}  // namespace bytecheckpoint::base
