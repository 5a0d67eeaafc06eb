// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind.h"

#include <pybind11/stl.h>

#include "csrc/bridge/checkpoint.h"
#include "csrc/bridge/gil.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/engine/load/row_major_reader.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

using base::text;
using engine::RowMajorReader;

std::unique_ptr<RowMajorReader> open_reader(const Checkpoint& checkpoint, const std::vector<std::string>& tensors,
                                            const std::string& directory, engine::Scope rank, bool direct_io,
                                            bool verify, int num_io_threads, int64_t ring_bytes, double io_timeout_s) {
  const std::shared_ptr<const format::Manifest> manifest = checkpoint.shared_whole();
  engine::LoadOptions options;
  options.directory = manifest->data_directory(directory);
  options.scope = rank;
  options.direct_io = direct_io;
  options.verify = verify;
  options.num_io_threads = num_io_threads;
  options.ring_bytes = ring_bytes;
  options.io_timeout_s = io_timeout_s;
  auto reader = std::make_unique<RowMajorReader>(std::move(options), manifest, checkpoint.view());
  run_unlocked([&] { return reader->locate(tensors); });
  return reader;
}

/// Runs what is wanted. Looks for Ctrl-C between segments; the error that the handler raised stays set.
/// \returns the bytes that were read.
int64_t run_reader(RowMajorReader& reader) {
  bool interrupted = false;
  const auto cancelled = [&] {
    const WithGil locked;
    interrupted = PyErr_CheckSignals() != 0;
    return interrupted;
  };
  auto result = unlocked([&] { return reader.run(cancelled); });
  if (interrupted) throw py::error_already_set();
  return value_or_raise(std::move(result)).bytes_read;
}

/// Fills a buffer. \param wanted  Each range: the tensor, its first element, the one behind its last, and where in the
/// buffer the elements come to lie.
int64_t read_ranges(RowMajorReader& reader, const std::vector<std::tuple<size_t, int64_t, int64_t, int64_t>>& wanted,
                    const py::buffer& buffer) {
  const py::buffer_info memory = buffer.request(/*writable=*/true);
  const int64_t room = memory.size * memory.itemsize;
  reader.forget();  // an earlier call may have raised before it read
  for (const auto& [tensor, first, last, offset] : wanted) {
    const bool is_there = tensor < reader.num_tensors() && 0 <= first && first <= last && last <= reader.numel(tensor);
    if (!is_there) throw py::value_error(text("elements [", first, ", ", last, ") of tensor ", tensor));
    if (first == last) continue;
    const int64_t itemsize = tensor::find_dtype(reader.dtype(tensor))->itemsize_bytes;
    if (offset < 0 || offset > room || last - first > (room - offset) / itemsize) {
      throw py::value_error(text("offset ", offset, " of a buffer of ", room, " bytes"));
    }
    raise_if_error(reader.want(tensor, first, last, static_cast<uint8_t*>(memory.ptr) + offset));
  }
  return run_reader(reader);
}

py::list read_objects(RowMajorReader& reader, const std::vector<std::string>& fqns) {
  py::list out;
  reader.forget();
  for (const std::string& fqn : fqns) {
    const format::Record& record = *value_or_raise(reader.object(fqn));
    py::bytes bytes(nullptr, static_cast<size_t>(record.bytes));
    reader.want_record(record, 0, record.bytes, reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(bytes.ptr())));
    out.append(std::move(bytes));
  }
  (void)run_reader(reader);
  return out;
}

/// Returns the name of the dtype in which each tensor is stored, and the bytes of an element; None without elements.
std::vector<std::optional<std::pair<std::string, int64_t>>> dtypes_of(const RowMajorReader& reader) {
  std::vector<std::optional<std::pair<std::string, int64_t>>> dtypes(reader.num_tensors());
  for (size_t t = 0; t < dtypes.size(); ++t) {
    const tensor::DTypeInfo* info = tensor::find_plain_dtype(reader.dtype(t));
    if (info != nullptr) dtypes[t] = {info->name, info->itemsize_bytes};
  }
  return dtypes;
}

}  // namespace

void bind_row_major(py::module_& m) {
  py::class_<RowMajorReader>(m, "RowMajorReader", py::module_local())
      .def(py::init(&open_reader), py::arg("checkpoint"), py::arg("tensors"), py::kw_only(), py::arg("directory"),
           py::arg("rank"), py::arg("direct_io"), py::arg("verify"), py::arg("num_io_threads"), py::arg("ring_bytes"),
           py::arg("io_timeout_s"))
      .def_property_readonly("dtypes", &dtypes_of)
      .def("read", &read_ranges, py::arg("wanted"), py::arg("buffer"))
      .def("read_objects", &read_objects, py::arg("fqns"));
}

}  // namespace bytecheckpoint::bindings
