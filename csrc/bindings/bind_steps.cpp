// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind_steps.h"

#include <pybind11/stl.h>

#include "csrc/bindings/errors.h"
#include "csrc/bindings/unlocked.h"
#include "csrc/engine/inspect_folder.h"
#include "csrc/engine/removal.h"
#include "csrc/io/directory.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;

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

/// Names in the directory are bytes to the file system.
py::list names_of(const std::vector<std::string>& names) {
  py::list out;
  for (const std::string& name : names) {
    out.append(py::reinterpret_steal<py::object>(
        PyUnicode_DecodeFSDefaultAndSize(name.data(), static_cast<py::ssize_t>(name.size()))));
  }
  return out;
}

/// The fields of FolderInspection under their names, ``state`` as a word.
py::dict inspect(const std::string& directory, const std::string& own_tmp) {
  const engine::FolderInspection found = value_unlocked([&] { return engine::inspect_folder(directory, own_tmp); });
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

}  // namespace

void bind_steps(py::module_& m) {
  m.def("inspect_folder", &inspect, py::arg("directory"), py::arg("own_tmp") = "");
  m.def(
      "sync_directory",
      [](const std::string& directory) { run_unlocked([&] { return io::sync_directory(directory); }); },
      py::arg("directory"));
  py::class_<engine::Removal>(m, "Removal", py::module_local())
      .def(py::init([](const std::string& directory) {
             return value_unlocked([&] { return engine::Removal::begin(directory); });
           }),
           py::arg("directory"))
      .def_property_readonly("tmp", &engine::Removal::tmp)
      .def("remove_marks", [](engine::Removal& self) { run_unlocked([&] { return self.remove_marks(); }); })
      .def("check_right", [](engine::Removal& self) { run_unlocked([&] { return self.check_right(); }); })
      .def("finish", [](engine::Removal& self) { run_unlocked([&] { return self.finish(); }); });
}

}  // namespace bytecheckpoint::bindings
