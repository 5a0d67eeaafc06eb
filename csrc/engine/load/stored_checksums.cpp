// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/stored_checksums.h"

#include <algorithm>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/base/crc32.h"
#include "csrc/engine/open/planned_files.h"
#include "csrc/io/directory.h"
#include "csrc/io/file.h"

namespace bytecheckpoint::engine {

using base::Code;
using base::Status;
using base::text;

namespace {

// So much is read to complete a stretch, however little of it was added.
constexpr int64_t kAlwaysReadBytes = 16 << 20;
constexpr int64_t kRestBytes = 1 << 20;

}  // namespace

StoredChecksums::Stretch& StoredChecksums::find(const format::StoredCrc& stored) {
  Stretch& found = stretches_[{stored.file, stored.offset, stored.bytes}];
  found.stored = stored;
  return found;
}

void StoredChecksums::add(const format::StoredCrc& stretch, int64_t begin, int64_t end, const uint8_t* bytes) {
  Stretch& found = find(stretch);
  if (found.is_compared) return;
  found.parts.push_back({begin, end, base::crc32(0, bytes, static_cast<size_t>(end - begin))});
  found.bytes += end - begin;
  if (!std::exchange(found.is_touched, true)) touched_.push_back(&found);
}

int64_t StoredChecksums::sort(Stretch* stretch) {
  std::vector<Part>& parts = stretch->parts;
  std::sort(parts.begin(), parts.end(),
            [](const Part& a, const Part& b) { return a.begin != b.begin ? a.begin < b.begin : a.end > b.end; });
  int64_t at = stretch->stored.offset, missing = stretch->stored.bytes;
  std::vector<Part> apart;
  for (const Part& part : parts) {
    if (part.begin < at) continue;
    apart.push_back(part);
    missing -= part.end - part.begin;
    at = part.end;
  }
  parts = std::move(apart);
  stretch->bytes = stretch->stored.bytes - missing;
  return missing;
}

Status StoredChecksums::compare(Stretch* stretch, const format::Manifest& manifest, const std::string& directory) {
  const format::StoredCrc& stored = stretch->stored;
  uint32_t crc = 0;
  for (const Part& part : stretch->parts)
    crc = base::crc32_combine(crc, part.crc, static_cast<uint64_t>(part.end - part.begin));
  stretch->parts = {};
  stretch->is_compared = true;
  if (crc == stored.crc) return Status::ok();
  const std::string path = io::join(directory, manifest.files[stored.file].name);
  return Status::make(
      Code::kCorrupt,
      text("read(", path, ", offset=", stored.offset, ", ", stored.bytes, " bytes): the data have CRC ", crc,
           ", but the archive says ", stored.crc,
           "; if it was written with torch.serialization.set_crc32_options(False), load with Config(verify=False)"),
      path);
}

Status StoredChecksums::check(const format::Manifest& manifest, const std::string& directory) {
  for (Stretch* const stretch : std::exchange(touched_, {})) {
    stretch->is_touched = false;
    if (stretch->bytes < stretch->stored.bytes || sort(stretch) != 0) continue;
    BCP_RETURN_IF_ERROR(compare(stretch, manifest, directory));
  }
  return Status::ok();
}

Status StoredChecksums::finish(const format::Manifest& manifest, const std::string& directory,
                               const std::function<bool(int64_t)>& progress) {
  std::vector<uint8_t> buffer;
  int64_t done = 0;
  for (auto& [key, stretch] : stretches_) {
    if (stretch.is_compared) continue;
    const int64_t missing = sort(&stretch);
    if (missing > std::max(stretch.bytes, kAlwaysReadBytes)) continue;
    const format::StoredCrc& stored = stretch.stored;
    BCP_ASSIGN_OR_RETURN(io::File file, open_planned(directory, manifest.files[stored.file], /*direct=*/false));
    buffer.resize(kRestBytes);
    std::vector<Part> all;
    int64_t at = stored.offset;
    const auto read_until = [&](int64_t end) -> Status {
      while (at < end) {
        const int64_t size = std::min(kRestBytes, end - at);
        BCP_RETURN_IF_ERROR(file.read_at(buffer.data(), size, at, size).status());
        all.push_back({at, at + size, base::crc32(0, buffer.data(), static_cast<size_t>(size))});
        at += size;
        done += size;
        if (!progress(done)) return Status::make(Code::kCancelled, text("read(", file.path(), "): interrupted"));
      }
      return Status::ok();
    };
    for (const Part& part : stretch.parts) {
      BCP_RETURN_IF_ERROR(read_until(part.begin));
      all.push_back(part);
      at = part.end;
    }
    BCP_RETURN_IF_ERROR(read_until(stored.offset + stored.bytes));
    stretch.parts = std::move(all);
    BCP_RETURN_IF_ERROR(compare(&stretch, manifest, directory));
  }
  return Status::ok();
}

std::string StoredChecksums::take() {
  base::ByteWriter out;
  for (auto& [key, stretch] : stretches_) {
    if (stretch.parts.empty()) continue;
    const format::StoredCrc& stored = stretch.stored;
    for (const int64_t number : {int64_t{stored.file}, stored.offset, stored.bytes, int64_t{stored.crc},
                                 static_cast<int64_t>(stretch.parts.size())}) {
      out.i64(number);
    }
    for (const Part& part : stretch.parts) {
      for (const int64_t number : {part.begin, part.end, int64_t{part.crc}}) out.i64(number);
    }
    stretch.parts = {};
    stretch.bytes = 0;
  }
  return out.take();
}

Status StoredChecksums::merge(std::string_view taken) {
  base::ByteReader in(taken);
  while (in.remaining() > 0) {
    format::StoredCrc stored;
    stored.file = static_cast<uint32_t>(in.i64());
    stored.offset = in.i64();
    stored.bytes = in.i64();
    stored.crc = static_cast<uint32_t>(in.i64());
    Stretch& stretch = find(stored);
    for (int64_t left = in.i64(); left > 0 && in.ok(); --left) {
      const int64_t begin = in.i64(), end = in.i64();
      stretch.parts.push_back({begin, end, static_cast<uint32_t>(in.i64())});
      stretch.bytes += end - begin;
    }
    if (!in.ok()) return Status::make(Code::kCorrupt, "checksums of a conversion are cut off");
  }
  return Status::ok();
}

}  // namespace bytecheckpoint::engine
