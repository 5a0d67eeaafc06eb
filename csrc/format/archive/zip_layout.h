// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Numbers of the zip format that the reader and the writer share.

namespace bytecheckpoint::format::zip {

inline constexpr uint32_t kLocalHeader = 0x04034B50;
inline constexpr uint32_t kDataDescriptor = 0x08074B50;
inline constexpr uint32_t kCentralEntry = 0x02014B50;
inline constexpr uint32_t kZip64End = 0x06064B50;
inline constexpr uint32_t kZip64Locator = 0x07064B50;
inline constexpr uint32_t kEnd = 0x06054B50;

inline constexpr int64_t kLocalHeaderBytes = 30;  // before name and extra field

inline constexpr uint16_t kExtraZip64 = 1;
inline constexpr uint32_t kInZip64 = 0xFFFFFFFF;  // in a field of 32 bits: the value is in the zip64 extra field

}  // namespace bytecheckpoint::format::zip
