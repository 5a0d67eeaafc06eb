// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind.h"

#include <pybind11/stl.h>

#include <unordered_set>

#include "csrc/base/crc32.h"
#include "csrc/bridge/callbacks.h"
#include "csrc/bridge/checkpoint.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/engine/export/export_file.h"
#include "csrc/format/safetensors/safetensors.h"
#include "csrc/format/torch/torch_file_layout.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

/// A tensor in a file: name, offset, dtype.
using Placed = std::tuple<std::string, int64_t, std::string>;

/// Writes a file, and returns (bytes, CRC) of it.
std::pair<int64_t, uint32_t> write(const Checkpoint& checkpoint, engine::ExportOptions options,
                                   const std::string& directory, const std::vector<engine::TensorToRead>& tensors,
                                   const engine::FileFrame& frame, py::object convert,
                                   std::unordered_set<std::string> computed, py::object progress) {
  const std::shared_ptr<const format::Manifest> manifest = checkpoint.shared_whole();
  options.reading.directory = manifest->data_directory(directory);
  Callbacks callbacks(std::move(convert), std::move(progress));
  callbacks.serve(&options);
  options.computed = std::move(computed);
  options.checksums = checkpoint.checksums();
  auto result = unlocked([&] { return engine::export_file(options, manifest, checkpoint.view(), tensors, frame); });
  if (callbacks.raised()) throw py::error_already_set();
  const engine::ExportedFile exported = value_or_raise(std::move(result));
  return {exported.bytes, exported.crc};
}

engine::ExportOptions options_of(std::string path, bool direct_io, bool verify, int num_io_threads, int64_t ring_bytes,
                                 double io_timeout_s, bool needs_crc) {
  engine::ExportOptions options;
  options.reading.direct_io = options.direct_io = direct_io;
  options.reading.verify = verify;
  options.reading.num_io_threads = options.num_io_threads = num_io_threads;
  options.reading.io_timeout_s = io_timeout_s;
  options.ring_bytes = ring_bytes;
  options.path = std::move(path);
  options.needs_crc = needs_crc;
  return options;
}

std::pair<int64_t, uint32_t> export_file(const Checkpoint& checkpoint, const std::string& directory, std::string path,
                                         const std::string& head, const std::vector<Placed>& tensors,
                                         int64_t file_bytes, bool direct_io, bool verify, int num_io_threads,
                                         int64_t ring_bytes, double io_timeout_s, py::object convert,
                                         std::unordered_set<std::string> computed, py::object progress,
                                         bool needs_crc) {
  std::vector<engine::TensorToRead> to_read;
  engine::FileFrame frame;
  for (const auto& [fqn, offset, dtype] : tensors) {
    to_read.push_back({fqn, tensor::dtype_of(dtype)});
    frame.offsets.push_back(offset);
  }
  frame.file_bytes = file_bytes;
  frame.before = [&](size_t number, const std::vector<uint32_t>&) { return number == 0 ? head : std::string(); };
  return write(checkpoint,
               options_of(std::move(path), direct_io, verify, num_io_threads, ring_bytes, io_timeout_s, needs_crc),
               directory, to_read, frame, std::move(convert), std::move(computed), std::move(progress));
}

/// \param pickle   Names the storage of each tensor by its position in `tensors`, and those of `held` behind them.
/// \param tensors  [(name, dtype, bytes), ...]
/// \param held     The bytes of storages that are not read from the checkpoint: those of tensors in objects.
std::pair<int64_t, uint32_t> export_torch_file(
    const Checkpoint& checkpoint, const std::string& directory, std::string path, const std::string& pickle,
    const std::vector<std::tuple<std::string, std::string, int64_t>>& tensors,
    const std::vector<std::string_view>& held, bool direct_io, bool verify, int num_io_threads, int64_t ring_bytes,
    double io_timeout_s, py::object convert, std::unordered_set<std::string> computed, py::object progress,
    bool needs_crc) {
  std::vector<engine::TensorToRead> to_read;
  std::vector<int64_t> storage_bytes;
  for (const auto& [fqn, dtype, bytes] : tensors) {
    to_read.push_back({fqn, tensor::dtype_of(dtype)});
    storage_bytes.push_back(bytes);
  }
  for (const std::string_view bytes : held) storage_bytes.push_back(static_cast<int64_t>(bytes.size()));
  const format::TorchFileLayout file(pickle, storage_bytes);
  engine::FileFrame frame;
  frame.offsets.assign(file.storage_offsets().begin(),
                       file.storage_offsets().begin() + static_cast<std::ptrdiff_t>(tensors.size()));
  frame.file_bytes = file.file_bytes();
  frame.needs_crcs = true;
  frame.before = [&](size_t number, const std::vector<uint32_t>& crcs) {
    if (number < tensors.size()) return file.before(number, crcs);
    std::vector<uint32_t> all = crcs;
    for (const std::string_view bytes : held) all.push_back(base::crc32(0, bytes.data(), bytes.size()));
    std::string out = file.before(number, all);
    for (const std::string_view bytes : held) out.append(bytes).append(file.before(++number, all));
    return out;
  };
  return write(checkpoint,
               options_of(std::move(path), direct_io, verify, num_io_threads, ring_bytes, io_timeout_s, needs_crc),
               directory, to_read, frame, std::move(convert), std::move(computed), std::move(progress));
}

uint32_t checksum_of_file(const std::string& directory, const std::string& name, py::object progress) {
  Callbacks callbacks(py::none(), std::move(progress));
  auto result = unlocked([&] {
    return engine::checksum_of_file(directory, name, [&](int64_t done) { return callbacks.progress(done); });
  });
  if (callbacks.raised()) throw py::error_already_set();
  return value_or_raise(std::move(result));
}

/// Compares the checksums of what conversions have read with those that another writer stored.
/// \param taken  What `take_checksums` has returned in the processes that converted.
void compare_checksums(const Checkpoint& checkpoint, const std::vector<py::bytes>& taken, const std::string& directory,
                       py::object progress) {
  const format::Manifest& manifest = checkpoint.whole();
  engine::StoredChecksums* const checksums = checkpoint.checksums();
  for (const py::bytes& each : taken) raise_if_error(checksums->merge(std::string_view(each)));
  Callbacks callbacks(py::none(), std::move(progress));
  const base::Status outcome = unlocked([&] {
    return checksums->finish(manifest, manifest.data_directory(directory),
                             [&](int64_t done) { return callbacks.progress(done); });
  });
  if (callbacks.raised()) throw py::error_already_set();
  raise_if_error(outcome);
}

/// Returns the name that safetensors have for a dtype; None if they have none.
py::object safetensors_dtype(const std::string& dtype) {
  const char* name = format::safetensors_name(tensor::dtype_of(dtype));
  return name == nullptr ? py::object(py::none()) : py::str(name);
}

}  // namespace

void bind_export(py::module_& m) {
  m.def("export_file", &export_file, py::arg("checkpoint"), py::kw_only(), py::arg("directory"), py::arg("path"),
        py::arg("head"), py::arg("tensors"), py::arg("file_bytes"), py::arg("direct_io"), py::arg("verify"),
        py::arg("num_io_threads"), py::arg("ring_bytes"), py::arg("io_timeout_s"), py::arg("convert"),
        py::arg("computed"), py::arg("progress"), py::arg("needs_crc"));
  m.def("export_torch_file", &export_torch_file, py::arg("checkpoint"), py::kw_only(), py::arg("directory"),
        py::arg("path"), py::arg("pickle"), py::arg("tensors"), py::arg("held"), py::arg("direct_io"),
        py::arg("verify"), py::arg("num_io_threads"), py::arg("ring_bytes"), py::arg("io_timeout_s"),
        py::arg("convert"), py::arg("computed"), py::arg("progress"), py::arg("needs_crc"));
  m.def(
      "typed_storage",
      [](const std::string& dtype) -> std::optional<std::string> {
        const tensor::DTypeInfo* info = tensor::find_dtype(dtype);
        if (info == nullptr || info->typed_storage == nullptr) return std::nullopt;
        return info->typed_storage;
      },
      py::arg("dtype"));
  m.def("take_checksums", [](const Checkpoint& c) { return py::bytes(c.checksums()->take()); }, py::arg("checkpoint"));
  m.def("compare_checksums", &compare_checksums, py::arg("checkpoint"), py::arg("taken"), py::kw_only(),
        py::arg("directory"), py::arg("progress"));
  m.def("checksum_of_file", &checksum_of_file, py::arg("directory"), py::arg("name"), py::arg("progress"));
  m.def("safetensors_dtype", &safetensors_dtype, py::arg("dtype"));
}

}  // namespace bytecheckpoint::bindings
