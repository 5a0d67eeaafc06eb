// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string_view>

#include "csrc/base/status.h"
#include "csrc/base/trace.h"

namespace bytecheckpoint::io {

constexpr std::string_view kLivePageName = "bytecheckpoint-call";
constexpr std::string_view kLivePageMagic = "BCPLIVE1";

/// Makes a page of memory in which other processes of this user see what a call is doing: an open file of this process
/// without a place in any folder, so that nothing is left when the process ends, however it ends.
///
///     /proc/<pid>/fd/<n> -> /memfd:bytecheckpoint-call
///     | magic, 8 bytes | LiveCounters | length of the header, 4 bytes | header |    4 KiB, little-endian
///
/// \param header  Says which call this is. It is cut where the page ends.
/// \returns the counters, which hold the page. kStorage if the system refuses.
base::Result<std::shared_ptr<base::LiveCounters>> make_live_page(std::string_view header);

}  // namespace bytecheckpoint::io
