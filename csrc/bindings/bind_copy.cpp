// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind.h"

#include <pybind11/stl.h>

#include <functional>
#include <unordered_set>

#include "csrc/bridge/callbacks.h"
#include "csrc/bridge/checkpoint.h"
#include "csrc/bridge/tree_caster.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/engine/commit/assemble.h"
#include "csrc/engine/copy/copy_files.h"
#include "csrc/engine/export/copy_shard.h"
#include "csrc/engine/random_id.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

/// ([(name, dtype, first row, number of rows), ...], [name, ...]) as Python has it.
using Shard = std::pair<std::vector<std::tuple<std::string, std::string, int64_t, int64_t>>, std::vector<std::string>>;

engine::ShardToCopy shard_of(const Shard& shard) {
  engine::ShardToCopy out;
  for (const auto& [fqn, dtype, first, rows] : shard.first) {
    out.tensors.push_back({{fqn, tensor::dtype_of(dtype)}, first, rows});
  }
  out.as_is = shard.second;
  return out;
}

/// Returns the encoded WriteResult.
py::bytes copy_shard(const Checkpoint& checkpoint, const std::string& directory, std::string target, uint32_t rank,
                     bool plain, const Shard& shard, int64_t num_bytes, bool direct_io, bool verify, int num_io_threads,
                     int64_t ring_bytes, double io_timeout_s, py::object convert,
                     std::unordered_set<std::string> computed, py::object progress) {
  const std::shared_ptr<const format::Manifest> manifest = checkpoint.shared_whole();
  engine::CopyOptions options;
  options.reading.directory = manifest->data_directory(directory);
  options.reading.verify = verify;
  options.reading.direct_io = options.saving.direct_io = direct_io;
  options.reading.num_io_threads = options.saving.num_io_threads = num_io_threads;
  options.reading.io_timeout_s = options.saving.io_timeout_s = io_timeout_s;
  options.saving.ring_bytes = ring_bytes;
  options.saving.directory = std::move(target);
  options.saving.rank = rank;
  options.saving.is_plain = plain;
  options.saving.expected_bytes = num_bytes;
  Callbacks callbacks(std::move(convert), std::move(progress));
  callbacks.serve(&options);
  options.computed = std::move(computed);
  options.checksums = checkpoint.checksums();
  const engine::ShardToCopy to_copy = shard_of(shard);
  auto result = unlocked([&] { return engine::copy_shard(options, manifest, checkpoint.view(), to_copy); });
  if (callbacks.raised()) throw py::error_already_set();
  return py::bytes(format::encode_write_result(value_or_raise(std::move(result))));
}

/// Returns the checkpoint that the shards make together.
CheckpointHolder assemble_copy(const Checkpoint& checkpoint, const std::vector<Shard>& shards,
                               const std::vector<py::bytes>& results, py::handle planner_data,
                               std::string checkpoint_id, std::string user_metadata) {
  const format::Manifest& manifest = checkpoint.whole();
  std::vector<engine::ShardToCopy> to_copy;
  for (const Shard& shard : shards) to_copy.push_back(shard_of(shard));
  format::Tree tree = tree_from_python(planner_data);
  const std::vector<std::string_view> encoded(results.begin(), results.end());
  return CheckpointHolder(new Checkpoint(value_unlocked([&]() -> base::Result<format::Manifest> {
    BCP_ASSIGN_OR_RETURN(format::Manifest plan, engine::plan_copy(manifest, to_copy));
    BCP_ASSIGN_OR_RETURN(plan.save_id, engine::draw_save_id());
    plan.planner_data = std::move(tree);
    plan.checkpoint_id = std::move(checkpoint_id);
    plan.user_metadata = std::move(user_metadata);
    std::vector<format::WriteResult> written;
    for (const std::string_view result : encoded) {
      BCP_ASSIGN_OR_RETURN(written.emplace_back(), format::decode_write_result(result));
    }
    return engine::assemble_manifest(std::move(plan), written);
  })));
}

/// Returns the names of the files that `copy_shard` wrote.
std::vector<std::string> written_files(const py::bytes& result) {
  std::vector<std::string> names;
  for (format::FileEntry& file : value_or_raise(format::decode_write_result(std::string_view(result))).files) {
    names.push_back(std::move(file.name));
  }
  return names;
}

/// Returns the bytes that were copied.
int64_t copy_files(const Checkpoint& checkpoint, std::string source, std::string target, bool direct_io,
                   int num_threads, int64_t ring_bytes, int niceness, int64_t bytes_per_s, double io_timeout_s,
                   const py::object& progress) {
  const std::shared_ptr<const format::Manifest> manifest = checkpoint.shared_whole();
  engine::CopyFilesOptions options{std::move(source), std::move(target), direct_io,   num_threads,
                                   ring_bytes,        niceness,          bytes_per_s, io_timeout_s};
  Progress tell(progress);
  auto result = unlocked([&] { return engine::copy_files(options, *manifest, std::ref(tell)); });
  if (tell.raised()) throw py::error_already_set();
  return value_or_raise(std::move(result));
}

}  // namespace

void bind_copy(py::module_& m) {
  m.def("copy_shard", &copy_shard, py::arg("checkpoint"), py::kw_only(), py::arg("directory"), py::arg("target"),
        py::arg("rank"), py::arg("plain"), py::arg("shard"), py::arg("num_bytes"), py::arg("direct_io"),
        py::arg("verify"), py::arg("num_io_threads"), py::arg("ring_bytes"), py::arg("io_timeout_s"),
        py::arg("convert"), py::arg("computed"), py::arg("progress"));
  m.def("copy_files", &copy_files, py::arg("checkpoint"), py::kw_only(), py::arg("source"), py::arg("target"),
        py::arg("direct_io"), py::arg("num_threads"), py::arg("ring_bytes"), py::arg("niceness"),
        py::arg("bytes_per_s"), py::arg("io_timeout_s"), py::arg("progress"));
  m.def("written_files", &written_files, py::arg("result"));
  m.def("assemble_copy", &assemble_copy, py::arg("checkpoint"), py::kw_only(), py::arg("shards"), py::arg("results"),
        py::arg("planner_data"), py::arg("checkpoint_id"), py::arg("user_metadata"));
}

}  // namespace bytecheckpoint::bindings
