// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/torch_files.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

#include "csrc/engine/open/planned_files.h"
#include "csrc/format/torch/torch_file.h"
#include "csrc/io/file.h"
#include "csrc/io/file_system.h"
#include "csrc/io/object_store.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

/// \param entry  Receives the name and the version of the file.
/// \returns kNotFound for a file that does not begin as those of torch.save do.
base::Result<format::Manifest> read_one(const ModelFiles& files, size_t number, format::FileEntry* entry) {
  const bool has_lasting_inodes = !io::is_url(files.directory) && io::has_lasting_inodes(files.directory);
  BCP_ASSIGN_OR_RETURN(io::File file, io::File::open(files.directory, files.stored[number], /*direct=*/false));
  entry->name = files.stored[number];
  BCP_ASSIGN_OR_RETURN(entry->version, version_to_note(file, has_lasting_inodes));
  BCP_ASSIGN_OR_RETURN(const int64_t size, file.size());
  BCP_ASSIGN_OR_RETURN(const std::string first, file.read(0, std::min(size, format::kTorchMagicBytes)));
  if (!format::has_torch_magic(first)) return no_checkpoint(file.path(), "file of torch.save");
  auto read = format::read_torch_file(size, [&](int64_t offset, int64_t bytes) { return file.read(offset, bytes); });
  if (read.is_ok()) return read;
  Status fault = read.status();
  if (!fault.path().empty()) return fault;  // the file's own error
  return Status::make(fault.code(), text("read(", file.path(), "): ", fault.message()), file.path());
}

/// Moves what `part`, of file `number`, has behind what `all` has.
void append(format::Manifest part, uint32_t number, format::Manifest* all) {
  format::ForeignMeta &from = *part.foreign, &to = *all->foreign;
  for (format::Item& item : part.items) {
    item.ordinal += static_cast<uint32_t>(all->items.size());
    format::Record& record = item.chunks.front().record;
    record.file = number;
    if (record.kind == format::RecordKind::kStrided) {
      record.data_bytes += static_cast<int64_t>(to.strides.size());
    } else if (record.kind != format::RecordKind::kTensor) {
      record.data_offset += static_cast<int64_t>(to.texts.size());
    }
  }
  for (format::StoredCrc& crc : from.crcs) crc.file = number;
  std::move(part.items.begin(), part.items.end(), std::back_inserter(all->items));
  std::move(from.strides.begin(), from.strides.end(), std::back_inserter(to.strides));
  to.crcs.insert(to.crcs.end(), from.crcs.begin(), from.crcs.end());
  to.texts += from.texts;
}

}  // namespace

base::Result<format::Manifest> read_torch_files(const ModelFiles& files) {
  format::Manifest all;
  for (size_t number = 0; number < files.stored.size(); ++number) {
    format::FileEntry entry;
    auto read = read_one(files, number, &entry);
    if (!read.is_ok()) return file_failure(files, read.status());
    if (number == 0) {
      all = std::move(read.value());
    } else {
      append(std::move(read.value()), static_cast<uint32_t>(number), &all);
      all.files.emplace_back();
    }
    all.files.back() = std::move(entry);
  }
  return all;
}

}  // namespace bytecheckpoint::engine
