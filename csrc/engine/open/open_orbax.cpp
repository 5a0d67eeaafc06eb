// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/open_orbax.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/base/bytes.h"
#include "csrc/base/mutex.h"
#include "csrc/base/named_thread.h"
#include "csrc/engine/open/model_files.h"
#include "csrc/engine/open/planned_files.h"
#include "csrc/format/orbax/orbax_tree.h"
#include "csrc/format/orbax/zarr_array.h"
#include "csrc/format/pickle/pickle_writer.h"
#include "csrc/format/torch/builtin_archive.h"
#include "csrc/format/torch/stored_tensor.h"
#include "csrc/format/tree.h"
#include "csrc/io/directory.h"
#include "csrc/io/file.h"
#include "csrc/io/file_system.h"
#include "csrc/io/object_store.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

using LeafKind = format::OrbaxLeaf::Kind;

constexpr std::string_view kWhatOfOrbax = "checkpoint of Orbax";
constexpr const char* kTreeFile = "_METADATA";
constexpr const char* kDatabase = "manifest.ocdbt";
constexpr const char* kStringsFile = "_strings.json";
constexpr int64_t kMostDescriptionBytes = 256 << 20;
constexpr size_t kArrayThreads = 8;

Status in_file(Status fault, const std::string& directory, const std::string& name) {
  return fault.path().empty() ? std::move(fault).in_file(io::join(directory, name)) : fault;
}

bool has_entry(const std::string& directory, const char* name) {
  const auto type = io::entry_type(io::join(directory, name));
  return type.is_ok() && type.value() != io::EntryType::kAbsent;
}

/// Makes a position the next one in row-major order.
void advance(const tensor::Dims& counts, tensor::Dims* position) {
  for (size_t d = counts.size(); d > 0; --d) {
    int64_t& at = (*position)[d - 1];
    if (++at < counts[d - 1]) return;
    at = 0;
  }
}

/// Returns the folder with the arrays: `path`, or the only one in it.
base::Result<std::string> find_folder(const std::string& path) {
  if (io::is_url(path)) return path;
  BCP_ASSIGN_OR_RETURN(const std::vector<std::string> listed, names_to_search(path, kWhatOfOrbax));
  std::vector<std::string> found;
  for (const std::string& name : listed) {
    if (name == kTreeFile) return path;
    if (has_entry(io::join(path, name), kTreeFile)) found.push_back(name);
  }
  std::sort(found.begin(), found.end());
  if (found.empty()) return no_checkpoint(path, kWhatOfOrbax);
  if (found.size() == 1) return io::join(path, found[0]);
  return Status::make(Code::kUnsupported,
                      text("open(", path, "): it has checkpoints of Orbax in ", found[0], " and ", found[1],
                           found.size() > 2 ? " and others" : "", ": pass the folder of one of them"),
                      path);
}

class OrbaxReader {
 public:
  explicit OrbaxReader(std::string directory)
      : directory_(std::move(directory)),
        has_lasting_inodes_(!io::is_url(directory_) && io::has_lasting_inodes(directory_)) {}

  base::Result<format::Manifest> read(const Description& described) {
    auto tree = format::read_orbax_tree(described.bytes);
    if (!tree.is_ok()) return in_file(tree.status(), directory_, kTreeFile);
    tree_ = std::move(tree.value());
    if (tree_.is_in_database) return in_database();
    manifest_.foreign.emplace().format = "orbax";
    manifest_.foreign->description = {directory_, kTreeFile, described.version};
    manifest_.files.emplace_back().name = kTreeFile;  // which objects name
    manifest_.files.back().version = described.version;
    for (uint32_t i = 0; i < tree_.leaves.size(); ++i) {
      format::Item& item = manifest_.items.emplace_back();
      item.fqn = tree_.leaves[i].name;
      item.ordinal = i;
    }
    BCP_RETURN_IF_ERROR(add_objects());
    BCP_RETURN_IF_ERROR(add_arrays());
    keep_paths();
    return std::move(manifest_);
  }

 private:
  Status in_database() const {
    return Status::make(Code::kUnsupported,
                        text("open(", directory_,
                             "): its arrays are in an OCDBT database, which is not read here: "
                             "restore it by Orbax and save it with use_ocdbt=False, or save its arrays with "
                             "safetensors.flax.save_file"),
                        directory_);
  }

  Status add_objects() {
    std::map<std::string, std::string> strings;
    const bool has_strings = std::any_of(tree_.leaves.begin(), tree_.leaves.end(),
                                         [](const format::OrbaxLeaf& leaf) { return leaf.kind == LeafKind::kString; });
    if (has_strings) {
      BCP_ASSIGN_OR_RETURN(const Description described,
                           read_description(directory_, kStringsFile, kMostDescriptionBytes));
      auto read = format::read_orbax_strings(described.bytes);
      if (!read.is_ok()) return in_file(read.status(), directory_, kStringsFile);
      strings = std::move(read.value());
    }
    for (size_t i = 0; i < tree_.leaves.size(); ++i) {
      const format::OrbaxLeaf& leaf = tree_.leaves[i];
      if (leaf.kind == LeafKind::kArray) continue;
      format::Record& record = manifest_.items[i].chunks.emplace_back().record;
      if (leaf.kind == LeafKind::kOther) {
        format::set_text(format::RecordKind::kRefused,
                         text("'", leaf.name, "' is a ", leaf.type, ", of which nothing ", "is stored"),
                         &*manifest_.foreign, &record);
        continue;
      }
      const auto found = strings.find(leaf.name);
      if (leaf.kind == LeafKind::kString && found == strings.end()) {
        return corrupt(kStringsFile, text("it has no string '", leaf.name, "'"));
      }
      format::set_text(format::RecordKind::kInline,
                       pickle_of(leaf.kind, found == strings.end() ? std::string() : found->second),
                       &*manifest_.foreign, &record);
      record.bytes = format::archive_bytes_of_pickle(record.data_bytes);
    }
    return Status::ok();
  }

  static std::string pickle_of(LeafKind kind, const std::string& string) {
    format::PickleWriter out(2);
    if (kind == LeafKind::kNone) out.none();
    if (kind == LeafKind::kEmptyDict) out.empty_dict();
    if (kind == LeafKind::kEmptyList) out.empty_list();
    if (kind == LeafKind::kString) (void)out.string(string);
    return out.finish();
  }

  /// Reads what describes each array, and finds its chunks. Each array costs some requests, so threads share them.
  Status add_arrays() {
    std::vector<size_t> arrays;
    for (size_t i = 0; i < tree_.leaves.size(); ++i) {
      if (tree_.leaves[i].kind == LeafKind::kArray) arrays.push_back(i);
    }
    std::vector<Found> found(arrays.size());
    std::atomic<size_t> next{0};
    base::Mutex mutex;
    Status failure;
    base::work_together("bcp-arrays", std::min(kArrayThreads, arrays.size()), [&] {
      for (size_t i = next++; i < arrays.size(); i = next++) {
        Status outcome = find_chunks(tree_.leaves[arrays[i]], &found[i]);
        if (outcome.is_ok()) continue;
        const base::MutexLock lock(mutex);
        if (failure.is_ok()) failure = std::move(outcome);
        next = arrays.size();
      }
    });
    BCP_RETURN_IF_ERROR(failure);
    for (size_t i = 0; i < arrays.size(); ++i) take(std::move(found[i]), &manifest_.items[arrays[i]]);
    return Status::ok();
  }

  /// An array, and for each of its pieces a file and a chunk.
  struct Found {
    format::ZarrArray array;
    std::vector<format::FileEntry> files;
    std::vector<format::Chunk> chunks;
    bool is_strided = false;  // some piece sticks out of the array
  };

  base::Result<format::ZarrArray> read_array(const std::string& name) const {
    const std::string file = text(name, tree_.is_zarr3 ? "/zarr.json" : "/.zarray");
    const auto described = read_description(directory_, file, kMostDescriptionBytes);
    if (!described.is_ok() && described.status().sys_errno() == ENOENT) {
      return corrupt(file, text("the array '", name, "' is missing"));
    }
    BCP_RETURN_IF_ERROR(described.status());
    auto array =
        tree_.is_zarr3 ? format::read_zarr3(described.value().bytes) : format::read_zarr2(described.value().bytes);
    if (!array.is_ok()) return in_file(array.status(), directory_, file);
    return array;
  }

  Status find_chunks(const format::OrbaxLeaf& leaf, Found* out) const {
    BCP_ASSIGN_OR_RETURN(out->array, read_array(leaf.name));
    const tensor::Dims counts = out->array.num_chunks();
    int64_t left = 0;
    (void)tensor::checked_numel(counts, &left);  // `read_zarr*` have looked
    tensor::Dims position(counts.size());
    for (; left > 0; --left) {
      BCP_RETURN_IF_ERROR(add_file(leaf.name, position, out));
      advance(counts, &position);
    }
    return Status::ok();
  }

  /// Adds the pieces of one file.
  Status add_file(const std::string& name, const tensor::Dims& position, Found* out) const {
    const format::ZarrArray& array = out->array;
    format::FileEntry entry;
    entry.name = text(name, "/", array.name_of_chunk(position));
    auto opened = io::File::open(directory_, entry.name, /*direct=*/false);
    if (!opened.is_ok() && opened.status().sys_errno() == ENOENT) {
      return missing(entry.name, text("chunk ", tensor::to_text(position), " of '", name, "' is missing"));
    }
    BCP_RETURN_IF_ERROR(opened.status());
    io::File& file = opened.value();
    BCP_ASSIGN_OR_RETURN(entry.version, version_to_note(file, has_lasting_inodes_));
    BCP_ASSIGN_OR_RETURN(const int64_t size, file.size());
    std::vector<format::ZarrPiece> pieces{{0, size}};
    if (array.has_index) {
      BCP_ASSIGN_OR_RETURN(pieces, read_index(array, size, &file));
    }
    const tensor::Dims counts = array.num_pieces();
    tensor::Dims at(counts.size());
    for (const format::ZarrPiece& piece : pieces) {
      BCP_RETURN_IF_ERROR(add_piece(entry, position, at, piece, out));
      advance(counts, &at);
    }
    return Status::ok();
  }

  static base::Result<std::vector<format::ZarrPiece>> read_index(const format::ZarrArray& array, int64_t size,
                                                                 io::File* file) {
    const int64_t bytes = array.index_bytes(), offset = array.is_index_first ? 0 : size - bytes;
    if (bytes > size) {
      return Status::make(
          Code::kCorrupt,
          text("read(", file->path(), "): the file has ", size, " bytes, too few for an index of ", bytes),
          file->path());
    }
    BCP_ASSIGN_OR_RETURN(const std::string index, file->read(offset, bytes));
    auto pieces = format::read_zarr_index(array, index, size);
    if (!pieces.is_ok()) return pieces.status().at(offset, bytes).in_file(file->path());
    return pieces;
  }

  /// \param position  Of the file in the array. \param at  Of the piece in the file.
  Status add_piece(const format::FileEntry& file, const tensor::Dims& position, const tensor::Dims& at,
                   const format::ZarrPiece& piece, Found* out) const {
    const format::ZarrArray& array = out->array;
    format::Chunk chunk;
    bool is_whole = true;
    for (size_t d = 0; d < position.size(); ++d) {
      const int64_t begin = position[d] * array.chunk_sizes[d] + at[d] * array.inner_sizes[d];
      const int64_t size = std::min(array.inner_sizes[d], array.sizes[d] - begin);
      if (size <= 0) return Status::ok();  // all of it sticks out
      is_whole &= size == array.inner_sizes[d];
      chunk.box.offsets.push_back(begin);
      chunk.box.sizes.push_back(size);
    }
    const int64_t bytes = array.piece_bytes();
    if (piece.bytes < 0) return missing(file.name, text("the part at ", tensor::to_text(at), " is missing"));
    if (!array.is_packed && piece.bytes != bytes) {
      return corrupt(file.name, text("a part of it has ", piece.bytes, " bytes, but must have ", bytes));
    }
    format::Record& record = chunk.record;
    record.kind = is_whole ? format::RecordKind::kTensor : format::RecordKind::kStrided;
    record.stored_dtype = array.dtype;
    record.file = static_cast<uint32_t>(out->files.size());
    record.offset = record.data_offset = array.is_packed ? 0 : piece.offset;
    record.bytes = record.data_bytes = bytes;
    out->is_strided |= !is_whole;
    out->files.push_back(file);
    if (array.is_packed) out->files.back().packing = {piece.offset, piece.bytes, bytes};
    out->chunks.push_back(std::move(chunk));
    return Status::ok();
  }

  void take(Found found, format::Item* item) {
    format::ForeignMeta& foreign = *manifest_.foreign;
    foreign.is_packed |= found.array.is_packed;
    item->is_tensor = true;
    item->tensor.dtype = found.array.dtype;
    item->tensor.sizes = found.array.sizes;
    const auto first = static_cast<uint32_t>(manifest_.files.size());
    std::move(found.files.begin(), found.files.end(), std::back_inserter(manifest_.files));
    const tensor::Dims strides = tensor::row_major_strides(found.array.inner_sizes);
    const auto number = static_cast<int64_t>(foreign.strides.size());
    if (found.is_strided) foreign.strides.push_back(strides);
    for (format::Chunk& chunk : found.chunks) {
      chunk.record.file += first;
      if (chunk.record.kind != format::RecordKind::kStrided) continue;
      int64_t reach = 1;
      for (size_t d = 0; d < strides.size(); ++d) reach += (chunk.box.sizes[d] - 1) * strides[d];
      chunk.record.bytes = reach * tensor::find_plain_dtype(found.array.dtype)->itemsize_bytes;
      chunk.record.data_bytes = number;
    }
    item->chunks = std::move(found.chunks);
    if (!item->chunks.empty()) return;
    // An array without elements has no files.
    format::Chunk& empty = item->chunks.emplace_back();
    empty.box = tensor::whole(found.array.sizes);
    empty.record.kind = format::RecordKind::kTensor;
    empty.record.stored_dtype = found.array.dtype;
  }

  /// Keeps the way to each value, so that the tree can be made again.
  void keep_paths() {
    base::ByteWriter out;
    format::encode_container(format::Tree::Kind::kDict, 2 * tree_.leaves.size(), &out);
    for (const format::OrbaxLeaf& leaf : tree_.leaves) {
      format::encode_text(format::Tree::Kind::kString, leaf.name, &out);
      out.raw(leaf.path);
    }
    manifest_.planner_data = format::Tree::from_encoded(out.take());
  }

  /// The failure for a part of an array that is not there.
  Status missing(const std::string& name, const std::string& what) const {
    if (tree_.has_all_chunks) return corrupt(name, what);
    const std::string path = io::join(directory_, name);
    return Status::make(Code::kUnsupported,
                        text("open(", path, "): ", what,
                             ": it is lost, or had the fill value alone, which this checkpoint need not store "
                             "(_METADATA lacks store_array_data_equal_to_fill_value): restore it by Orbax and save it "
                             "again"),
                        path);
  }

  Status corrupt(const std::string& name, const std::string& what) const {
    const std::string path = io::join(directory_, name);
    return Status::make(Code::kCorrupt, text("open(", path, "): ", what), path);
  }

  const std::string directory_;
  const bool has_lasting_inodes_;
  format::OrbaxTree tree_;
  format::Manifest manifest_;
};

}  // namespace

base::Result<format::Manifest> open_orbax(const std::string& path) {
  BCP_ASSIGN_OR_RETURN(const std::string directory, find_folder(path));
  if (has_entry(directory, kDatabase)) return no_checkpoint(path, kWhatOfOrbax);
  const auto described = read_description(directory, kTreeFile, kMostDescriptionBytes);
  if (!described.is_ok() && described.status().sys_errno() == ENOENT) return no_checkpoint(path, kWhatOfOrbax);
  BCP_RETURN_IF_ERROR(described.status());
  OrbaxReader reader(directory);
  BCP_ASSIGN_OR_RETURN(format::Manifest manifest, reader.read(described.value()));
  if (directory != path) manifest.foreign->directory = directory;
  return manifest;
}

}  // namespace bytecheckpoint::engine
