// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind.h"

#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <chrono>
#include <filesystem>
#include <memory>

#include "csrc/bridge/errors.h"
#include "csrc/bridge/gil.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/engine/check/inspect_folder.h"
#include "csrc/engine/check/unreferenced.h"
#include "csrc/engine/commit/removal.h"
#include "csrc/io/directory.h"
#include "csrc/io/file_system.h"
#include "csrc/io/io_deadline.h"
#include "csrc/io/late_changes.h"
#include "csrc/io/open_directory.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

const char* name_of(engine::FolderState state) {
  switch (state) {
    case engine::FolderState::kComplete:
      return "complete";
    case engine::FolderState::kSaving:
      return "saving";
    case engine::FolderState::kHalf:
      return "half";
    case engine::FolderState::kCorrupt:
      return "corrupt";
    case engine::FolderState::kIncomplete:
      return "incomplete";
    case engine::FolderState::kUnknown:
      break;
  }
  return "unknown";
}

/// Converts names. To the file system they are bytes, so they need not be UTF-8.
py::list names_of(const std::vector<std::string>& names) {
  py::list out;
  for (const std::string& name : names) {
    out.append(py::reinterpret_steal<py::object>(
        PyUnicode_DecodeFSDefaultAndSize(name.data(), static_cast<py::ssize_t>(name.size()))));
  }
  return out;
}

/// Returns the fields of FolderInspection under their names, ``state`` as a word.
py::dict inspect(const std::string& directory, const std::string& own_tmp, const engine::RanksHere& ranks) {
  const engine::FolderInspection found =
      value_unlocked([&] { return engine::inspect_folder(directory, own_tmp, ranks); });
  py::dict out;
  out["state"] = name_of(found.state);
  out["reason"] = to_text(found.reason);
  out["is_being_saved"] = found.is_being_saved;
  out["is_foreign"] = found.is_foreign;
  out["save_ids"] = found.save_ids;
  out["parts"] = found.parts;
  out["num_files"] = found.num_files;
  out["num_bytes"] = found.num_bytes;
  out["marks"] = names_of(found.marks);
  out["tmps"] = names_of(found.tmps);
  out["data_files"] = names_of(found.data_files);
  out["others"] = names_of(found.others);
  return out;
}

/// Names and paths are bytes to the file system.
using Path = std::filesystem::path;
using Directory = std::shared_ptr<io::OpenDirectory>;

Directory shared(base::Result<io::OpenDirectory> directory) {
  return std::make_shared<io::OpenDirectory>(value_or_raise(std::move(directory)));
}

constexpr std::chrono::milliseconds kBetweenSignals{50};

/// Returns (bytes, failures, why it was kept). Signal handlers run meanwhile; an error that they raise ends the
/// removal.
py::tuple remove_entry(const io::OpenDirectory& self, const Path& name, engine::Removal* right,
                       std::vector<std::string> stays, bool dry_run) {
  const engine::RemovalOptions options{std::move(stays), dry_run};
  bool raised = false;
  auto last = std::chrono::steady_clock::now();
  const auto may_go_on = [&] {
    const auto now = std::chrono::steady_clock::now();
    if (now - last < kBetweenSignals) return base::Status::ok();
    last = now;
    const WithGil locked;
    raised = PyErr_CheckSignals() != 0;
    return raised ? base::Status::make(base::Code::kCancelled, "interrupted") : base::Status::ok();
  };
  auto result = unlocked([&] { return engine::remove_entry(self, name.native(), right, may_go_on, options); });
  if (raised) throw py::error_already_set();
  const io::RemovalOutcome removed = value_or_raise(std::move(result));
  py::list failures;
  for (const base::Status& failure : removed.failures) failures.append(to_text(failure.message()));
  return py::make_tuple(removed.bytes, failures, removed.kept);
}

void bind_directory(py::module_& m) {
  py::class_<io::OpenDirectory, Directory>(m, "Directory", py::module_local())
      .def(py::init([](const Path& path) {
             return shared(unlocked([&] { return io::OpenDirectory::open(path.native()); }));
           }),
           py::arg("path"))
      .def(
          "below",
          [](const io::OpenDirectory& self, const Path& name) {
            return shared(unlocked([&] { return self.open_below(name.native()); }));
          },
          py::arg("name"))
      .def_property_readonly("id",
                             [](const io::OpenDirectory& self) {
                               const auto place = value_unlocked([&] { return self.place(); });
                               return std::make_pair(place.device, place.inode);
                             })
      .def_property_readonly("path", [](const io::OpenDirectory& self) { return Path(self.path()); })
      // For the dir_fd of Python's calls. It is closed with this object.
      .def("fileno", &io::OpenDirectory::fd)
      .def("sync", [](const io::OpenDirectory& self) { run_unlocked([&] { return self.sync(); }); })
      .def("remove", &remove_entry, py::arg("name"), py::arg("right").none(true) = py::none(), py::kw_only(),
           py::arg("stays") = std::vector<std::string>(), py::arg("dry_run") = false)
      .def(
          "remove_empty",
          [](const io::OpenDirectory& self, const Path& name) {
            run_unlocked([&] { return self.remove_directory(name.native()); });
          },
          py::arg("name"));
}

}  // namespace

void bind_steps(py::module_& m) {
  m.attr("REMOVAL_NOTE") = py::bytes(std::string(engine::kRemovalNote));
  m.def(
      "find_unreferenced",
      [](const std::string& directory) {
        const auto found = value_unlocked([&] { return engine::find_unreferenced(directory); });
        return py::make_tuple(names_of(found.files), names_of(found.notes));
      },
      py::arg("directory"));
  m.def("inspect_folder", &inspect, py::arg("directory"), py::arg("own_tmp") = "", py::arg("ranks") = py::none());
  m.def(
      "sync_directory",
      [](const std::string& directory) { run_unlocked([&] { return io::sync_directory(directory); }); },
      py::arg("directory"));
  m.def(
      "is_local",
      [](const std::string& path, double io_timeout_s) {
        return value_unlocked([&] {
          return io::run_with_deadline(io_timeout_s, "statfs", path,
                                       [path]() -> base::Result<bool> { return io::is_local(path); });
        });
      },
      py::arg("path"), py::arg("io_timeout_s"));
  m.def(
      "look_anew", [](const std::string& directory) { return unlocked([&] { return io::look_anew(directory); }); },
      py::arg("directory"));
  bind_directory(m);
  py::class_<engine::Removal>(m, "Removal", py::module_local())
      .def(py::init([](const Directory& directory) {
             return value_unlocked([&] { return engine::Removal::begin(directory); });
           }),
           py::arg("directory"))
      .def_property_readonly("tmp", &engine::Removal::tmp)
      .def("remove_marks", [](engine::Removal& self) { return value_unlocked([&] { return self.remove_marks(); }); })
      .def("check_right", [](engine::Removal& self) { run_unlocked([&] { return self.check_right(); }); })
      .def("finish", [](engine::Removal& self) { run_unlocked([&] { return self.finish(); }); });
}

}  // namespace bytecheckpoint::bindings
