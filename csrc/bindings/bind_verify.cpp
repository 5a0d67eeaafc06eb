// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <functional>

#include "csrc/bridge/callbacks.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/engine/check/check_data_file.h"
#include "csrc/engine/check/verify_job.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

py::list texts(const std::vector<std::string>& all) {
  py::list out;
  for (const std::string& one : all) out.append(to_text(one));
  return out;
}

/// Returns {"save_ids", "num_files", "num_records", "bytes_checked", "bytes_unchecked", "problems": [(file, section,
/// offset, bytes, fqns, message)], "unreferenced", "notes"}.
py::dict verify(std::string directory, bool direct_io, int num_threads, int64_t ring_bytes,
                const py::object& progress) {
  engine::VerifyOptions options;
  options.directory = std::move(directory);
  options.direct_io = direct_io;
  options.num_threads = std::clamp(num_threads, 1, 64);
  options.ring_bytes = ring_bytes;
  Progress tell(progress);
  auto result = unlocked([&] { return engine::verify_checkpoint(options, std::ref(tell)); });
  if (tell.raised()) throw py::error_already_set();
  const engine::VerifyReport report = value_or_raise(std::move(result));
  py::list problems;
  for (const engine::Problem& p : report.problems) {
    problems.append(py::make_tuple(p.file, p.section, p.offset, p.bytes, p.fqns, to_text(p.message)));
  }
  py::dict out;
  out["save_ids"] = report.save_ids;
  out["num_files"] = report.num_files;
  out["num_records"] = report.num_records;
  out["bytes_checked"] = report.bytes_checked;
  out["bytes_unchecked"] = report.bytes_unchecked;
  out["problems"] = problems;
  out["unreferenced"] = texts(report.unreferenced);
  out["notes"] = texts(report.notes);
  return out;
}

}  // namespace

void bind_verify(py::module_& m) {
  m.def("verify", &verify, py::arg("directory"), py::kw_only(), py::arg("direct_io"), py::arg("num_threads"),
        py::arg("ring_bytes"), py::arg("progress"));
  m.def(
      "check_data_file",
      [](int fd, const std::string& path, int num_threads) {
        run_unlocked([&] { return engine::check_data_file(fd, path, num_threads); });
      },
      py::arg("fd"), py::arg("path"), py::kw_only(), py::arg("num_threads"));
}

}  // namespace bytecheckpoint::bindings
