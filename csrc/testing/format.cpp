// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include "csrc/base/crc32.h"
#include "csrc/bridge/dims_caster.h"
#include "csrc/bridge/errors.h"
#include "csrc/bridge/tree_caster.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/format/pickle/pickle_writer.h"
#include "csrc/format/torch/torch_archive.h"
#include "csrc/format/torch/zip_record.h"
#include "csrc/planner/load_plan.h"
#include "csrc/testing/bindings.h"

namespace bytecheckpoint::testing {
namespace {

namespace py = pybind11;
using namespace bridge;

using tensor::Dims;

/// Returns (head, data offset, data bytes, tail) of a tensor record.
py::tuple zip_record(const std::string& dtype, const Dims& sizes, int64_t record_offset, uint32_t data_crc) {
  const tensor::DTypeInfo* info = tensor::find_dtype(dtype);
  const format::ZipRecord record = value_or_raise(
      format::ZipRecord::layout(info == nullptr ? tensor::DType::kNone : info->dtype, sizes, record_offset));
  return py::make_tuple(py::bytes(record.head()), record.data_offset(), record.data_bytes(),
                        py::bytes(record.tail(data_crc)));
}

/// Returns [(file, [(offset, bytes, [wanted, ...]), ...]), ...] for [(file, data offset, chunk sizes, box offsets, box
/// sizes, itemsize), ...].
py::list plan_load(const std::vector<std::tuple<uint32_t, int64_t, Dims, Dims, Dims, int64_t>>& boxes,
                   int64_t block_bytes, int64_t max_segment_bytes) {
  std::vector<planner::WantedBox> wanted;
  for (const auto& [file, data_offset, chunk_sizes, box_offsets, box_sizes, itemsize] : boxes) {
    wanted.push_back(
        value_or_raise(planner::wanted_of_chunk(file, data_offset, chunk_sizes, {box_offsets, box_sizes}, itemsize)));
  }
  const planner::LoadPlan plan = planner::plan_load(wanted, block_bytes, max_segment_bytes);
  py::list out, segments;
  for (size_t i = 0; i < plan.segments.size(); ++i) {
    const planner::ReadSegment& s = plan.segments[i];
    if (i == 0 || plan.segments[i - 1].file != s.file) {
      segments = py::list();
      out.append(py::make_tuple(s.file, segments));
    }
    segments.append(py::make_tuple(s.offset, s.bytes, s.wanted));
  }
  return out;
}

py::bytes pickle_tree(py::handle value) {
  format::PickleWriter writer(4);
  writer.tree(tree_from_python(value));
  return writer.finish();
}

std::string_view bytes_of(const py::bytes& data) {
  return std::string_view(data);
}

/// Returns (dtype, sizes, strides, data offset, storage offset, storage bytes, CRC or None, is_conj, is_neg), or None
/// for an archive of anything but one plain tensor.
py::object tensor_archive(const py::bytes& data) {
  const std::string_view bytes = bytes_of(data);
  const format::ReadBytes read = [&](int64_t offset, int64_t size) {
    return base::Result<std::string>(std::string(bytes.substr(static_cast<size_t>(offset), static_cast<size_t>(size))));
  };
  const auto archived = value_or_raise(format::read_tensor_archive(static_cast<int64_t>(bytes.size()), read));
  if (!archived.has_value()) return py::none();
  return py::make_tuple(tensor::find_dtype(archived->dtype)->name, archived->sizes, archived->strides,
                        archived->data_offset, archived->storage_offset, archived->storage_bytes, archived->storage_crc,
                        archived->is_conj, archived->is_neg);
}

}  // namespace

void bind_format(py::module_& m) {
  m.def(
      "crc32",
      [](const py::bytes& data, uint32_t crc) {
        const std::string_view bytes = bytes_of(data);
        return unlocked([&] { return base::crc32(crc, bytes.data(), bytes.size()); });
      },
      py::arg("data"), py::arg("crc") = 0);
  m.def("crc32_combine", &base::crc32_combine, py::arg("crc_a"), py::arg("crc_b"), py::arg("length_b"));
  m.def("zip_record", &zip_record, py::arg("dtype"), py::arg("sizes"), py::arg("record_offset"), py::arg("data_crc"));
  m.def("plan_load", &plan_load, py::arg("boxes"), py::arg("block_bytes"), py::arg("max_segment_bytes"));
  m.def("pickle_tree", &pickle_tree, py::arg("value"));
  m.def("tensor_archive", &tensor_archive, py::arg("data"));
  m.def(
      "tree_round_trip",
      [](py::handle value) {
        return tree_to_python(value_or_raise(format::decode_tree(tree_from_python(value).bytes())));
      },
      py::arg("value"));
}

}  // namespace bytecheckpoint::testing
