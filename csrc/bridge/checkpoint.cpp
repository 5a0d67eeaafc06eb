// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/checkpoint.h"

#include <cstdlib>

#include "csrc/bridge/errors.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/engine/open/open_any_checkpoint.h"
#include "csrc/io/file.h"
#include "csrc/io/io_deadline.h"

namespace bytecheckpoint::bridge {
namespace {

/// Returns the bytes of the commit mark, or 0 if that cannot be found out: opening the mark will then give the reason.
int64_t mark_bytes(const std::string& directory, engine::Scope rank) {
  const base::Result<io::File> mark = io::File::open(directory, engine::mark_name(rank), false);
  if (!mark.is_ok()) return 0;
  const base::Result<int64_t> size = mark.value().size();
  return size.is_ok() ? size.value() : 0;
}

struct OpenedCheckpoint {
  format::Manifest manifest;
  std::optional<engine::ManifestReader> reader;  // if it is read in parts
};

base::Result<OpenedCheckpoint> open_slowly(const std::string& directory, const engine::OpenOptions& options,
                                           int64_t max_whole_bytes, double io_timeout_s) {
  if (mark_bytes(directory, options.scope) > max_whole_bytes) {
    auto reader = engine::ManifestReader::open(directory, options.scope, io_timeout_s);
    // The metadata of other writers can only be read whole.
    if (reader.is_ok()) {
      BCP_ASSIGN_OR_RETURN(format::Manifest head, reader.value().read_head());
      return OpenedCheckpoint{std::move(head), std::move(reader.value())};
    }
    if (reader.status().code() != base::Code::kUnsupported) return reader.status();
  }
  BCP_ASSIGN_OR_RETURN(format::Manifest manifest, engine::open_any_checkpoint(directory, options));
  return OpenedCheckpoint{std::move(manifest), {}};
}

}  // namespace

Checkpoint Checkpoint::open(const std::string& directory, const engine::OpenOptions& options, int64_t max_whole_bytes,
                            double io_timeout_s) {
  OpenedCheckpoint opened = value_unlocked([&] {
    return io::run_with_deadline(io_timeout_s, "open", directory, [directory, options, max_whole_bytes, io_timeout_s] {
      return open_slowly(directory, options, max_whole_bytes, io_timeout_s);
    });
  });
  Checkpoint checkpoint(std::move(opened.manifest));
  if (opened.reader.has_value()) {
    checkpoint.parts_ = Parts{std::move(*opened.reader), directory, options, io_timeout_s};
  }
  return checkpoint;
}

const format::Manifest& Checkpoint::whole() const {
  if (!parts_.has_value()) return *manifest_;
  format::Manifest all = value_unlocked([&] {
    return io::run_with_deadline(parts_->io_timeout_s, "open", parts_->directory,
                                 [directory = parts_->directory, options = parts_->options] {
                                   return engine::open_checkpoint(directory, options);
                                 });
  });
  if (all.save_id != manifest_->save_id) {
    raise(base::Status::make(base::Code::kChanged,
                             base::text("open(", parts_->directory, "): a newer commit replaced the checkpoint"),
                             parts_->directory));
  }
  manifest_ = std::make_shared<format::Manifest>(std::move(all));
  parts_.reset();
  return *manifest_;
}

engine::ChunkInRecord Checkpoint::find_chunk(const std::string& fqn, const tensor::Dims& offsets, int64_t hint) const {
  const auto refuse = [&](const std::string& why) { raise_as("KeyMismatchError", "'" + fqn + "': " + why); };
  const format::Item* item = whole().find(fqn);
  if (item == nullptr) refuse("the checkpoint has no such key");
  const auto& chunks = item->chunks;
  if (hint >= 0 && hint < static_cast<int64_t>(chunks.size()) && chunks[hint].box.offsets == offsets) {
    return chunk_of(*item, static_cast<size_t>(hint));
  }
  for (size_t c = 0; c < chunks.size(); ++c) {
    if (chunks[c].box.offsets == offsets) return chunk_of(*item, c);
  }
  refuse("the checkpoint has no chunk at " + tensor::to_text(offsets));
  std::abort();  // unreachable: refuse throws
}

}  // namespace bytecheckpoint::bridge
