// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/check/file_check.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

#include "csrc/base/crc32.h"
#include "csrc/format/torch/record_layouts.h"
#include "csrc/io/directory.h"

namespace bytecheckpoint::engine {

using base::Code;
using base::Status;
using base::text;

FileCheck::FileCheck(const format::FileEntry& entry, std::vector<Record> records)
    : entry_(entry), records_(std::move(records)) {
  std::sort(records_.begin(), records_.end(),
            [](const Record& a, const Record& b) { return a.chunk->record.offset < b.chunk->record.offset; });
  int64_t last_end = 0;
  for (size_t r = 0; r < records_.size(); ++r) last_ends_.push_back(last_end = std::max(last_end, end_of(r)));
}

Status FileCheck::open(const std::string& directory, const format::Manifest& manifest, bool direct_io) {
  base::MutexLock lock(mutex_);
  const auto opened = SourceFile::open(directory, manifest, entry_);
  if (!opened.is_ok()) {
    // Without a sound trailer and table, nothing can be said about the blocks.
    Status fault = opened.status();
    if (fault.code() != Code::kCorrupt && fault.code() != Code::kVersion && fault.code() != Code::kStorage) {
      return fault;
    }
    const bool is_absent = fault.sys_errno() == ENOENT;
    add({entry_.name,
         is_absent ? "file" : "block table or trailer",
         fault.offset(),
         fault.num_bytes(),
         {},
         fault.message()});
    return Status::ok();
  }
  BCP_ASSIGN_OR_RETURN(io::File file, opened.value()->reopen(direct_io));
  source_ = opened.value();
  file_ = std::make_shared<io::File>(std::move(file));
  bytes_left_ = source_->end_of_records;
  return Status::ok();
}

void FileCheck::add(Problem problem) {
  if (problems_.size() < kMaxProblems) problems_.push_back(std::move(problem));
}

size_t FileCheck::first_record_at(int64_t offset) const {
  return static_cast<size_t>(std::upper_bound(last_ends_.begin(), last_ends_.end(), offset) - last_ends_.begin());
}

void FileCheck::look_at(int64_t offset, int64_t size, const uint8_t* bytes) {
  Seen seen;
  if (check_blocks(offset, size, bytes)) {
    seen = see(offset, size, bytes);
    if (offset == 0) check_header(bytes, size);
  }
  base::MutexLock lock(mutex_);
  const auto join = [](auto* all, auto* more) {
    all->insert(all->end(), std::make_move_iterator(more->begin()), std::make_move_iterator(more->end()));
  };
  join(&seen_.part_crcs, &seen.part_crcs);
  join(&seen_.tails, &seen.tails);
  join(&seen_.odd, &seen.odd);
  bytes_left_ -= size;
  if (bytes_left_ > 0 || has_missed_) return;
  if (problems_.empty()) conclude();
  seen_ = {};
  file_.reset();
}

void FileCheck::miss(const Status& failure) {
  base::MutexLock lock(mutex_);
  if (!has_missed_) add({entry_.name, "records", -1, -1, {}, failure.message()});
  has_missed_ = true;
}

bool FileCheck::has_missed() {
  base::MutexLock lock(mutex_);
  return has_missed_;
}

std::vector<Problem> FileCheck::take_problems() {
  base::MutexLock lock(mutex_);
  std::stable_sort(problems_.begin(), problems_.end(),
                   [](const Problem& a, const Problem& b) { return a.offset < b.offset; });
  return std::move(problems_);
}

bool FileCheck::check_blocks(int64_t offset, int64_t size, const uint8_t* bytes) {
  bool is_sound = true;
  for (int64_t begin = 0; begin < size; begin += format::kBlockBytes) {
    const int64_t part = std::min(format::kBlockBytes, size - begin);
    const Status sound = source_->check_blocks(bytes + begin, offset + begin, part);
    if (sound.is_ok()) continue;
    is_sound = false;
    Problem problem = block_problem(offset + begin, part, sound.message());
    base::MutexLock lock(mutex_);
    add(std::move(problem));
  }
  return is_sound;
}

Problem FileCheck::block_problem(int64_t offset, int64_t size, std::string message) const {
  Problem problem{entry_.name, offset == 0 ? "header" : "records", offset, size, {}, std::move(message)};
  for (size_t r = first_record_at(offset); r < records_.size() && begin_of(r) < offset + size; ++r) {
    if (end_of(r) > offset) problem.fqns.push_back(records_[r].item->fqn);
  }
  if (!problem.fqns.empty()) problem.section = "records";
  return problem;
}

FileCheck::Seen FileCheck::see(int64_t offset, int64_t size, const uint8_t* bytes) const {
  Seen seen;
  const int64_t end = offset + size;
  const auto text_of = [&](int64_t from, int64_t to) {
    return std::string_view(reinterpret_cast<const char*>(bytes) + (from - offset), static_cast<size_t>(to - from));
  };
  format::RecordLayouts layouts;
  for (size_t r = first_record_at(offset); r < records_.size() && begin_of(r) < end; ++r) {
    const format::Record& place = records_[r].chunk->record;
    if (place.kind != format::RecordKind::kTensor || end_of(r) <= offset || end_of(r) > source_->end_of_records) {
      continue;
    }
    const auto zip = layouts.find(place.stored_dtype, records_[r].chunk->box.sizes, place.offset);
    if (!zip.is_ok() || zip.value()->data_offset() != place.data_offset ||
        zip.value()->data_bytes() != place.data_bytes || zip.value()->record_bytes() != place.bytes) {
      seen.odd.push_back(r);
      continue;
    }
    const int64_t data_end = place.data_offset + place.data_bytes;
    const auto within = [&](int64_t from, int64_t to) {
      return std::make_pair(std::max(from, offset), std::min(to, end));
    };
    if (const auto [from, to] = within(place.offset, place.data_offset); from < to) {
      const std::string_view head =
          std::string_view(zip.value()->head())
              .substr(static_cast<size_t>(from - place.offset), static_cast<size_t>(to - from));
      if (text_of(from, to) != head) seen.odd.push_back(r);
    }
    if (const auto [from, to] = within(place.data_offset, data_end); from < to) {
      seen.part_crcs.push_back({r, from, to - from, crc_of(from, to, offset, bytes)});
    }
    if (const auto [from, to] = within(data_end, place.offset + place.bytes); from < to) {
      seen.tails.push_back({r, from, std::string(text_of(from, to))});
    }
  }
  return seen;
}

/// Returns the CRC of [from, to) in a segment at `offset` whose blocks are sound.
uint32_t FileCheck::crc_of(int64_t from, int64_t to, int64_t offset, const uint8_t* bytes) const {
  uint32_t crc = 0;
  while (from < to) {
    const int64_t block = from / format::kBlockBytes;
    const int64_t next = std::min(to, (block + 1) * format::kBlockBytes);
    if (next - from == format::kBlockBytes) {
      crc = base::crc32_combine(crc, source_->block_crcs[static_cast<size_t>(block)], format::kBlockBytes);
    } else {
      crc = base::crc32(crc, bytes + (from - offset), static_cast<size_t>(next - from));
    }
    from = next;
  }
  return crc;
}

void FileCheck::check_header(const uint8_t* bytes, int64_t size) {
  const auto part = static_cast<size_t>(std::min(size, format::kHeaderBytes));
  const auto id = format::decode_header(std::string_view(reinterpret_cast<const char*>(bytes), part));
  if (id.is_ok() && id.value().file_id == entry_.id.file_id) return;
  base::MutexLock lock(mutex_);
  add({entry_.name,
       "header",
       0,
       format::kHeaderBytes,
       {},
       id.is_ok() ? "header of another file" : id.status().message()});
}

/// Compares the archive around the elements of each tensor, which stock readers use, with what it must be.
void FileCheck::conclude() {
  std::vector<uint32_t> crcs(records_.size(), 0);
  std::vector<std::string> tails(records_.size());
  const auto by_offset = [](const auto& a, const auto& b) { return a.offset < b.offset; };
  std::sort(seen_.part_crcs.begin(), seen_.part_crcs.end(), by_offset);
  std::sort(seen_.tails.begin(), seen_.tails.end(), by_offset);
  for (const PartCrc& part : seen_.part_crcs) {
    crcs[part.record] = base::crc32_combine(crcs[part.record], part.crc, static_cast<uint64_t>(part.bytes));
  }
  for (const Tail& tail : seen_.tails) tails[tail.record] += tail.bytes;
  std::vector<bool> odd(records_.size(), false);
  for (const size_t record : seen_.odd) odd[record] = true;
  format::RecordLayouts layouts;
  for (size_t r = 0; r < records_.size(); ++r) {
    const format::Chunk& chunk = *records_[r].chunk;
    const format::Record& place = chunk.record;
    const auto say = [&](std::string message) {
      add({entry_.name, "records", place.offset, place.bytes, {records_[r].item->fqn}, std::move(message)});
    };
    if (end_of(r) > source_->end_of_records) {
      say(text("the manifest names a record there, but the records end at ", source_->end_of_records));
      continue;
    }
    if (place.kind != format::RecordKind::kTensor) continue;
    const auto zip = layouts.find(place.stored_dtype, chunk.box.sizes, place.offset);
    if (odd[r] || !zip.is_ok() || tails[r] != zip.value()->tail(crcs[r])) {
      say(text("the archive that stock readers read is not that of a ", tensor::find_dtype(place.stored_dtype)->name,
               " tensor of ", tensor::to_text(chunk.box.sizes), " with these elements"));
    }
  }
}

}  // namespace bytecheckpoint::engine
