// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/bindings/bind.h"
#include "csrc/bridge/checkpoint.h"
#include "csrc/bridge/dcp_objects.h"
#include "csrc/bridge/gaps.h"
#include "csrc/bridge/gil.h"
#include "csrc/bridge/tree_caster.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/engine/commit/assemble.h"
#include "csrc/engine/commit/commit.h"
#include "csrc/engine/open/check_files.h"
#include "csrc/engine/random_id.h"
#include "csrc/format/manifest/metadata_file.h"
#include "csrc/io/directory.h"
#include "csrc/io/io_deadline.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

base::Id id_of(const std::string& save_id) {
  base::Id id;
  if (!base::id_from_hex(save_id, &id)) throw py::value_error("save id: must be 32 hex digits");
  return id;
}

/// Deletes a Commit in the background, because giving the right back is a call to the storage. A forked child has no
/// right to give back.
struct EndCommit {
  pid_t owner = ::getpid();
  bool is_bounded = true;
  void operator()(engine::Commit* commit) const {
    const WithoutGil no_gil;
    io::DeleteInBackground{is_bounded && ::getpid() == owner}(commit);
  }
};
using CommitHolder = std::unique_ptr<engine::Commit, EndCommit>;

CommitHolder begin_commit(std::string directory, const std::string& save_id, engine::Scope rank, bool overwrite,
                          bool take_over, bool sync, bool direct_io, int64_t reserve_bytes, std::string about,
                          double deadline_s, double visibility_timeout_s, double io_timeout_s) {
  engine::CommitOptions options;
  options.directory = std::move(directory);
  options.save_id = id_of(save_id);
  options.scope = rank;
  options.overwrite = overwrite;
  options.take_over = take_over;
  options.sync = sync;
  options.direct_io = direct_io;
  options.reserve_bytes = reserve_bytes;
  options.about = std::move(about);
  options.deadline_s = deadline_s;
  options.visibility_timeout_s = visibility_timeout_s;
  options.io_timeout_s = io_timeout_s;
  return CommitHolder(value_unlocked([&] { return engine::Commit::begin(std::move(options)); }).release(),
                      EndCommit{::getpid(), io_timeout_s > 0});
}

py::dict commit(engine::Commit& self, const Checkpoint& checkpoint) {
  const format::Manifest& manifest = checkpoint.whole();
  const engine::CommitReport report = value_unlocked(
      [&] { return self.commit(format::encode_metadata_file(manifest), manifest.files, manifest.save_id); });
  py::dict out;
  out["directory_synced"] = report.directory_synced;
  out["files_swept"] = report.files_swept;
  out["sweep_s"] = report.sweep_s;
  out["warnings"] = report.warnings;
  return out;
}

/// Joins the plan with what all ranks wrote. \param planned  Returns the manifest of the plan; called without the GIL.
template <class Planned>
CheckpointHolder join(const Planned& planned, const std::string& save_id, std::string checkpoint_id,
                      const std::vector<py::bytes>& results, std::string user_metadata, const std::string& gaps_name) {
  const engine::Gaps gaps = gaps_of(gaps_name);
  const base::Id id = id_of(save_id);
  const std::vector<std::string_view> encoded(results.begin(), results.end());
  return CheckpointHolder(new Checkpoint(value_unlocked([&]() -> base::Result<format::Manifest> {
    format::Manifest manifest = planned();
    manifest.save_id = id;
    manifest.checkpoint_id = std::move(checkpoint_id);
    manifest.user_metadata = std::move(user_metadata);
    std::vector<format::WriteResult> written;
    for (const std::string_view result : encoded) {
      BCP_ASSIGN_OR_RETURN(written.emplace_back(), format::decode_write_result(result));
    }
    return engine::assemble_manifest(std::move(manifest), written, gaps);
  })));
}

/// \param planned  The plan of our planner.
CheckpointHolder assemble_planned(const Checkpoint& planned, const std::string& save_id, std::string checkpoint_id,
                                  const std::vector<py::bytes>& results, std::string user_metadata,
                                  const std::string& gaps) {
  const format::Manifest& whole = planned.whole();
  return join([&] { return whole; }, save_id, std::move(checkpoint_id), results, std::move(user_metadata), gaps);
}

/// The same for a plan of another planner, whose metadata is read.
CheckpointHolder assemble(const std::string& save_id, std::string checkpoint_id, const py::dict& state_dict_metadata,
                          const std::vector<py::bytes>& results, py::handle planner_data, std::string user_metadata,
                          const std::string& gaps) {
  format::Manifest planned;
  planned.items = read_state_dict_metadata(state_dict_metadata);
  planned.planner_data = tree_from_python(planner_data);
  return join([&] { return std::move(planned); }, save_id, std::move(checkpoint_id), results, std::move(user_metadata),
              gaps);
}

/// Raises InvalidPlanError if the chunks of a planned tensor do not tile it.
void check_coverage(const py::dict& state_dict_metadata, const std::string& gaps) {
  const engine::Gaps wanted = gaps_of(gaps);
  std::vector<format::Item> items = read_state_dict_metadata(state_dict_metadata);
  run_unlocked([&]() -> base::Status {
    engine::CoverageCheck coverage;
    for (format::Item& item : items) BCP_RETURN_IF_ERROR(coverage.check(wanted, &item));
    return base::Status::ok();
  });
}

/// Makes a manifest from what DCP's metadata says about the tensors of a checkpoint, without where they are stored.
CheckpointHolder without_records(const py::dict& state_dict_metadata) {
  format::Manifest manifest;
  std::vector<format::Item>& items = manifest.items;
  items = read_state_dict_metadata(state_dict_metadata);
  std::sort(items.begin(), items.end(), [](const format::Item& a, const format::Item& b) { return a.fqn < b.fqn; });
  return CheckpointHolder(new Checkpoint(std::move(manifest)));
}

}  // namespace

// NOLINTNEXTLINE(readability-function-size): a list of what Python sees.
void bind_commit(py::module_& m) {
  m.def("draw_save_id", [] { return base::to_hex(value_or_raise(engine::draw_save_id())); });
  m.def("draw_save_ids_after", &engine::draw_save_ids_after, py::arg("began_ms"));
  m.def(
      "prepare_ring",
      [](int64_t ring_bytes, int64_t expected_bytes) {
        run_unlocked([&] { return staging::BorrowedRing::prepare(ring_bytes, expected_bytes); });
      },
      py::arg("ring_bytes"), py::arg("expected_bytes"));
  m.def("assemble", &assemble, py::arg("save_id"), py::arg("checkpoint_id"), py::arg("state_dict_metadata"),
        py::arg("results"), py::arg("planner_data"), py::arg("user_metadata"), py::arg("gaps") = "refuse");
  m.def("assemble_planned", &assemble_planned, py::arg("planned"), py::arg("save_id"), py::arg("checkpoint_id"),
        py::arg("results"), py::arg("user_metadata"), py::arg("gaps") = "refuse");
  m.def("check_coverage", &check_coverage, py::arg("state_dict_metadata"), py::arg("gaps"));
  m.def("without_records", &without_records, py::arg("state_dict_metadata"));
  m.def(
      "state_dict_metadata", [](const Checkpoint& c) { return make_state_dict_metadata(c.whole()); },
      py::arg("checkpoint"));
  m.def(
      "storage_data",
      [](const Checkpoint& c, const py::object& storage_info) { return make_storage_data(c.whole(), storage_info); },
      py::arg("checkpoint"), py::arg("storage_info"));
  m.def(
      "directory_id",
      [](const std::string& path, double io_timeout_s) -> std::optional<std::pair<uint64_t, uint64_t>> {
        const auto id = unlocked(
            [&] { return io::run_with_deadline(io_timeout_s, "stat", path, [path] { return io::file_id(path); }); });
        if (!id.is_ok() && id.status().sys_errno() == ETIMEDOUT) raise(id.status());
        if (!id.is_ok()) return std::nullopt;  // beginning a save there gives the reason
        return std::make_pair(id.value().device, id.value().inode);
      },
      py::arg("path"), py::arg("io_timeout_s"));
  py::class_<engine::Commit, CommitHolder>(m, "Commit", py::module_local())
      .def(py::init(&begin_commit), py::kw_only(), py::arg("directory"), py::arg("save_id"), py::arg("rank"),
           py::arg("overwrite"), py::arg("take_over"), py::arg("sync"), py::arg("direct_io"), py::arg("reserve_bytes"),
           py::arg("about"), py::arg("deadline_s"), py::arg("visibility_timeout_s"), py::arg("io_timeout_s"))
      .def(
          "check_files",
          [](engine::Commit& self, const Checkpoint& checkpoint, const engine::RanksHere& ranks) {
            run_unlocked([&] { return self.check_files(engine::files_here(checkpoint.head().files, ranks)); });
          },
          py::arg("checkpoint"), py::arg("ranks") = py::none())
      .def("check_right", [](engine::Commit& self) { run_unlocked([&] { return self.check_right(); }); })
      .def("commit", &commit, py::arg("checkpoint"))
      .def(
          "abort",
          [](engine::Commit& self, const std::vector<std::string>& file_names, bool in_doubt,
             const std::vector<std::string>& links) {
            run_unlocked([&] { return self.abort(file_names, in_doubt, links); });
          },
          py::arg("file_names"), py::arg("in_doubt"), py::arg("links") = std::vector<std::string>())
      .def_property_readonly("directory_id",
                             [](const engine::Commit& self) {
                               return std::make_pair(self.directory_id().device, self.directory_id().inode);
                             })
      .def("abandon", &engine::Commit::abandon, py::call_guard<WithoutGil>())
      .def("is_over", &engine::Commit::is_over, py::call_guard<WithoutGil>());
}

}  // namespace bytecheckpoint::bindings
