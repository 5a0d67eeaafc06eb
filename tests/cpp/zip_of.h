// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "csrc/base/bytes.h"
#include "csrc/base/crc32.h"

namespace bytecheckpoint::test {

/// A stored zip archive, as small as possible.
inline std::string zip_of(const std::vector<std::pair<std::string, std::string>>& entries,
                          const std::string& comment = "") {
  base::ByteWriter out, directory;
  for (const auto& entry : entries) {
    const std::string &name = entry.first, &content = entry.second;  // lambdas cannot capture structured bindings
    const uint32_t crc = base::crc32(0, content.data(), content.size());
    const auto bytes = static_cast<uint32_t>(content.size());
    const auto header = [&](base::ByteWriter* to) {
      to->u16(20);
      to->zeros(8);
      to->u32(crc);
      to->u32(bytes);
      to->u32(bytes);
      to->u16(static_cast<uint16_t>(name.size()));
      to->u16(0);
    };
    directory.raw("PK\1\2");
    directory.u16(20);
    header(&directory);
    directory.zeros(10);
    directory.u32(static_cast<uint32_t>(out.size()));
    directory.raw(name);
    out.raw("PK\3\4");
    header(&out);
    out.raw(name);
    out.raw(content);
  }
  const auto begin = static_cast<uint32_t>(out.size());
  out.raw(directory.bytes());
  out.raw("PK\5\6");
  out.zeros(4);
  out.u16(static_cast<uint16_t>(entries.size()));
  out.u16(static_cast<uint16_t>(entries.size()));
  out.u32(static_cast<uint32_t>(directory.size()));
  out.u32(begin);
  out.u16(static_cast<uint16_t>(comment.size()));
  out.raw(comment);
  return out.take();
}

}  // namespace bytecheckpoint::test
