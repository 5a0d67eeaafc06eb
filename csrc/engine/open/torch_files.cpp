// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/torch_files.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/engine/open/planned_files.h"
#include "csrc/format/torch/torch_file.h"
#include "csrc/format/tree.h"
#include "csrc/io/directory.h"
#include "csrc/io/file.h"
#include "csrc/io/file_system.h"
#include "csrc/io/object_store.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

/// Refuses a file that was written under the name of another one that is there, too: the files of ranks, or the values
/// of a parameter, have changed places.
/// \param folder  In the archive.
Status check_name(const ModelFiles& files, size_t number, const std::string& folder) {
  const std::string& name = files.stored[number];
  const size_t begin = name.rfind('/') + 1, end = name.rfind('.');
  if (end == std::string::npos || end < begin || name.compare(begin, end - begin, folder) == 0) return Status::ok();
  const std::string other = text(name.substr(0, begin), folder, name.substr(end));
  if (std::find(files.stored.begin(), files.stored.end(), other) == files.stored.end()) return Status::ok();
  const std::string path = io::join(files.directory, name);
  return Status::make(Code::kCorrupt,
                      text("open(", path, "): it was written as ", other, ", which is there, too: files have changed ",
                           "places, or are copies; give them back their names"),
                      path);
}

/// \param entry  Receives the name and the version of the file.
/// \returns kNotFound for a file that does not begin as those of torch.save do.
base::Result<format::Manifest> read_one(const ModelFiles& files, size_t number, format::FileEntry* entry) {
  const bool has_lasting_inodes = !io::is_url(files.directory) && io::has_lasting_inodes(files.directory);
  BCP_ASSIGN_OR_RETURN(io::File file, io::File::open(files.directory, files.stored[number], /*direct=*/false));
  entry->name = files.stored[number];
  BCP_ASSIGN_OR_RETURN(entry->version, version_to_note(file, has_lasting_inodes));
  BCP_ASSIGN_OR_RETURN(const int64_t size, file.size());
  BCP_ASSIGN_OR_RETURN(const std::string first, file.read(0, std::min(size, format::kTorchMagicBytes)));
  if (size == 0 && (files.stored.size() > 1 || !files.roots.empty())) {
    return Status::make(Code::kCorrupt, text("open(", file.path(), "): the file is empty (0 bytes)"), file.path());
  }
  if (!format::has_torch_magic(first)) return no_checkpoint(file.path(), "file of torch.save");
  const std::string_view root = files.roots.empty() ? std::string_view() : files.roots[number];
  std::string folder;
  auto read = format::read_torch_file(
      size, [&](int64_t offset, int64_t bytes) { return file.read(offset, bytes); }, root, &folder);
  if (read.is_ok()) {
    BCP_RETURN_IF_ERROR(check_name(files, number, folder));
    return read;
  }
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

/// The places of values in nested dicts, of all files: of a name that several have, that of the first.
class Paths {
 public:
  /// \param tree  Planner data as `format::read_torch_file` makes them: a dict of names and paths.
  void add(const format::Tree& tree) {
    format::TreeReader in(tree);
    const uint32_t num_children = in.next().num_children;
    for (uint32_t child = 0; child < num_children; child += 2) {
      const std::string_view name = in.next().text;
      const size_t begin = in.position();
      in.skip();
      if (!names_.emplace(name).second) continue;
      format::encode_text(format::Tree::Kind::kString, name, &entries_);
      entries_.raw(std::string_view(tree.bytes()).substr(begin, in.position() - begin));
    }
  }

  format::Tree take() {
    base::ByteWriter out;
    format::encode_container(format::Tree::Kind::kDict, 2 * names_.size(), &out);
    out.raw(entries_.take());
    return format::Tree::from_encoded(out.take());
  }

 private:
  std::unordered_set<std::string> names_;
  base::ByteWriter entries_;
};

}  // namespace

base::Result<format::Manifest> read_torch_files(const ModelFiles& files) {
  format::Manifest all;
  Paths paths;
  for (size_t number = 0; number < files.stored.size(); ++number) {
    format::FileEntry entry;
    auto read = read_one(files, number, &entry);
    if (!read.is_ok()) return file_failure(files, read.status());
    if (files.stored.size() > 1) paths.add(read.value().planner_data);
    if (number == 0) {
      all = std::move(read.value());
    } else {
      append(std::move(read.value()), static_cast<uint32_t>(number), &all);
      all.files.emplace_back();
    }
    all.files.back() = std::move(entry);
  }
  if (files.stored.size() > 1) all.planner_data = paths.take();
  return all;
}

}  // namespace bytecheckpoint::engine
