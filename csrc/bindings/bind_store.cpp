// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind.h"

#include "csrc/bridge/python_store.h"
#include "csrc/bridge/unlocked.h"
#include "csrc/io/upload_parts.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using namespace bridge;

/// One part, as a buffer. Whoever has it, or a view of it, keeps the writer's thread from using the slot again.
class PartBuffer {
 public:
  PartBuffer(std::shared_ptr<io::UploadParts> parts, std::shared_ptr<const io::UploadParts::Part> part)
      : parts_(std::move(parts)), part_(std::move(part)) {}
  ~PartBuffer() { parts_->release(*part_); }
  PartBuffer(const PartBuffer&) = delete;
  PartBuffer& operator=(const PartBuffer&) = delete;

  py::buffer_info view() const {
    return py::buffer_info(const_cast<uint8_t*>(part_->bytes), 1, "B", 1, {part_->size}, {1}, /*readonly=*/true);
  }

 private:
  const std::shared_ptr<io::UploadParts> parts_;
  const std::shared_ptr<const io::UploadParts::Part> part_;
};

std::unique_ptr<PartBuffer> next_part(const std::shared_ptr<io::UploadParts>& parts) {
  std::shared_ptr<const io::UploadParts::Part> part = unlocked([&] { return parts->next(); });
  if (part != nullptr) return std::make_unique<PartBuffer>(parts, std::move(part));
  raise_if_error(parts->status());
  throw py::stop_iteration();
}

}  // namespace

void bind_store(py::module_& m) {
  m.def(
      "register_store",
      [](std::string url, py::object client) {
        auto store = python_store(url, std::move(client));
        unlocked([&] { io::register_store(url, std::move(store)); });
      },
      py::arg("url"), py::arg("client"));
  py::class_<PartBuffer>(m, "PartBuffer", py::module_local(), py::buffer_protocol()).def_buffer(&PartBuffer::view);
  py::class_<io::UploadParts, std::shared_ptr<io::UploadParts>>(m, "UploadParts", py::module_local())
      .def("__iter__", [](const std::shared_ptr<io::UploadParts>& parts) { return parts; })
      .def("__next__", &next_part)
      .def(
          "fail",
          [](io::UploadParts& parts, int sys_errno, std::string message) {
            parts.fail(base::Status::make(base::Code::kStorage, std::move(message), {}, sys_errno));
          },
          py::arg("sys_errno"), py::arg("message"));
}

}  // namespace bytecheckpoint::bindings
