// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "csrc/base/bytes.h"
#include "csrc/base/crc32.h"
#include "csrc/bindings/bind_builtin.h"
#include "csrc/bindings/bind_calls.h"
#include "csrc/bindings/bind_checkpoint.h"
#include "csrc/bindings/bind_pickle.h"
#include "csrc/bindings/bind_planning.h"
#include "csrc/bindings/bind_steps.h"
#include "csrc/bindings/bind_synthetic.h"
#include "csrc/bindings/bind_verify.h"
#include "csrc/bindings/build_info.h"
#include "csrc/bindings/dims_caster.h"
#include "csrc/bindings/errors.h"
#include "csrc/bindings/tree_caster.h"
#include "csrc/format/pickle_writer.h"
#include "csrc/format/torch_archive.h"
#include "csrc/format/zip_record.h"
#include "csrc/planner/block_cuts.h"
#include "csrc/planner/load_plan.h"
#include "csrc/staging/available_memory.h"
#include "csrc/tensor/flat_range.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using tensor::Dims;

/// (head, data offset, data bytes, tail) of a tensor record.
py::tuple zip_record(const std::string& dtype, const Dims& sizes, int64_t record_offset, uint32_t data_crc) {
  const tensor::DTypeInfo* info = tensor::find_dtype(dtype);
  const format::ZipRecord record = value_or_raise(
      format::ZipRecord::layout(info == nullptr ? tensor::DType::kNone : info->dtype, sizes, record_offset));
  return py::make_tuple(py::bytes(record.head()), record.data_offset(), record.data_bytes(),
                        py::bytes(record.tail(data_crc)));
}

/// [[(offsets, sizes, position in the shard), ...], ...] for [(sizes, position in the flat tensor), ...]: the boxes of
/// each tensor that are in elements [begin, end) of all of them, flat and one behind the other.
py::list boxes_of_flat_shard(const std::vector<std::tuple<Dims, int64_t>>& tensors, int64_t begin, int64_t end) {
  py::list all;
  for (const auto& [sizes, position] : tensors) {
    int64_t numel = 0, tensor_end = 0;
    if (begin < 0 || begin > end || position < 0 || !tensor::checked_numel(sizes, &numel) ||
        !base::checked_add(position, numel, &tensor_end)) {
      raise(base::Status::make(base::Code::kInvalidArgument,
                               base::text("a tensor of ", tensor::to_text(sizes), " from element ", position,
                                          " on, of which elements [", begin, ", ", end, ") are wanted")));
    }
    const int64_t first = std::clamp(begin, position, tensor_end), last = std::clamp(end, position, tensor_end);
    int64_t at = first - begin;
    py::list of_tensor;
    for (tensor::Box& box : value_or_raise(tensor::boxes_of_flat_range(sizes, first - position, last - position))) {
      of_tensor.append(py::make_tuple(py::tuple(py::cast(box.offsets)), py::tuple(py::cast(box.sizes)), at));
      tensor::checked_numel(box.sizes, &numel);
      at += numel;
    }
    all.append(std::move(of_tensor));
  }
  return all;
}

/// [(file, [(offset, bytes, [wanted, ...]), ...]), ...] for [(file, data offset, chunk sizes, box offsets, box sizes,
/// itemsize), ...].
py::list plan_load(const std::vector<std::tuple<uint32_t, int64_t, Dims, Dims, Dims, int64_t>>& boxes,
                   int64_t block_bytes, int64_t max_segment_bytes) {
  std::vector<planner::WantedBox> wanted;
  for (const auto& [file, data_offset, chunk_sizes, box_offsets, box_sizes, itemsize] : boxes) {
    wanted.push_back({file, data_offset, chunk_sizes, {box_offsets, box_sizes}, itemsize});
  }
  const planner::LoadPlan plan = value_or_raise(planner::plan_load(wanted, block_bytes, max_segment_bytes));
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

/// (dtype, sizes, strides, data offset, storage offset, storage bytes, CRC or None, is_conj, is_neg), or None for an
/// archive of anything but one plain tensor.
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

void bind_core(py::module_& m) {
  m.def("build_info", &build_info);
  m.def("available_memory_bytes", [] { return staging::available_memory_bytes(); });
  m.def(
      "crc32",
      [](const py::bytes& data, uint32_t crc) {
        const std::string_view bytes = bytes_of(data);
        return base::crc32(crc, bytes.data(), bytes.size());
      },
      py::arg("data"), py::arg("crc") = 0);
  m.def("crc32_combine", &base::crc32_combine, py::arg("crc_a"), py::arg("crc_b"), py::arg("length_b"));
  m.def("dtype_names", [] {
    std::vector<std::string> names;
    for (uint8_t code = 1; code <= tensor::kLastPlainDType; ++code) names.emplace_back(tensor::find_dtype(code)->name);
    return names;
  });
  m.def("zip_record", &zip_record, py::arg("dtype"), py::arg("sizes"), py::arg("record_offset"), py::arg("data_crc"));
  m.def("boxes_of_flat_shard", &boxes_of_flat_shard, py::arg("tensors"), py::arg("begin"), py::arg("end"));
  m.def(
      "block_cuts",
      [](const Dims& sizes, const std::vector<int64_t>& cuts, int64_t min_block_elements) {
        return value_or_raise(planner::block_cuts(sizes, cuts, min_block_elements));
      },
      py::arg("sizes"), py::arg("cuts"), py::arg("min_block_elements"));
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

}  // namespace bytecheckpoint::bindings

PYBIND11_MODULE(_core, m) {
  m.doc() = "Format, planning and checks; needs no torch.";
  bytecheckpoint::bindings::bind_core(m);
  bytecheckpoint::bindings::bind_builtin(m);
  bytecheckpoint::bindings::bind_calls(m);
  bytecheckpoint::bindings::bind_checkpoint(m);
  bytecheckpoint::bindings::bind_pickle(m);
  bytecheckpoint::bindings::bind_planning(m);
  bytecheckpoint::bindings::bind_steps(m);
  bytecheckpoint::bindings::bind_verify(m);
  bytecheckpoint::bindings::bind_synthetic(m);
}
