// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/python_store.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "csrc/bridge/gil.h"
#include "csrc/io/directory.h"
#include "csrc/io/upload_parts.h"
#include "csrc/staging/slot_ring.h"

namespace bytecheckpoint::bridge {
namespace {

namespace py = pybind11;

using base::Result;
using base::Status;
using base::text;

/// Raises what a handler of a signal has raised, such as KeyboardInterrupt or SystemExit, once more, as soon as this
/// thread runs Python: the engine has no word for it. Handlers run in the main thread alone.
/// \returns false if it is not from there.
bool raise_later(py::error_already_set& error) {
  if (error.matches(PyExc_Exception)) return false;
  const py::object main_thread = py::module_::import("threading").attr("main_thread")();
  if (main_thread.attr("ident").cast<unsigned long>() != PyThread_get_thread_ident()) return false;
  PyObject* const value = error.value().inc_ref().ptr();
  const auto raise_now = [](void* raised) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(static_cast<PyObject*>(raised))),
                    static_cast<PyObject*>(raised));
    Py_DECREF(static_cast<PyObject*>(raised));
    return -1;
  };
  if (Py_AddPendingCall(raise_now, value) == 0) return true;
  Py_DECREF(value);
  return false;
}

/// Returns the Status of what Python raised. An OSError has the errno; the message of anything else is kept.
Status status_of(py::error_already_set& error, std::string_view operation, const std::string& path,
                 const std::string& detail) {
  if (raise_later(error)) {
    return Status::make(base::Code::kCancelled, text(operation, "(", path, "): interrupted: ", error.what()), path,
                        EINTR);
  }
  int code = EIO;
  std::string message = error.what();
  if (error.matches(PyExc_OSError)) {
    const py::object number = error.value().attr("errno");
    if (py::isinstance<py::int_>(number)) code = number.cast<int>();
    const py::object words = error.value().attr("strerror");
    if (py::isinstance<py::str>(words)) message = words.cast<std::string>();
  }
  const std::string place = detail.empty() ? path : path + ", " + detail;
  if (code == ESTALE) {
    return Status::make(base::Code::kChanged, text(operation, "(", place, "): ", message), path, code);
  }
  return Status::make(base::Code::kStorage, text(operation, "(", place, "): ", message), path, code);
}

/// Runs `call` with the GIL. \returns what it returns, or the Status of what it raises.
template <class T, class Call>
Result<T> with_python(std::string_view operation, const std::string& path, const std::string& detail, Call call) {
  const WithGil gil;
  std::optional<Result<T>> outcome;
  take_gil([&] {
    try {
      try {
        outcome.emplace(call());
      } catch (py::error_already_set& error) {
        outcome.emplace(status_of(error, operation, path, detail));
      }
    } catch (const std::exception& error) {  // a value of another type than the client should return or raise
      outcome.emplace(Status::make(base::Code::kStorage, text(operation, "(", path, "): ", error.what()), path, EIO));
    }
  });
  return std::move(*outcome);
}

/// A Python object whose reference is given up with the GIL, in whatever thread that happens.
class PythonReference {
 public:
  explicit PythonReference(py::object object) : object_(std::move(object)) {}
  PythonReference(PythonReference&&) = default;
  ~PythonReference() {
    if (!object_) return;
    const WithGil gil;
    object_ = py::object();
  }
  const py::object& operator*() const { return object_; }

 private:
  py::object object_;
};

class PythonUpload : public io::Upload {
 public:
  PythonUpload(std::string path, std::shared_ptr<io::UploadParts> parts, py::object future)
      : path_(std::move(path)), parts_(std::move(parts)), future_(std::move(future)) {}
  ~PythonUpload() override { parts_->fail(Status::make(base::Code::kCancelled, text("put(", path_, "): aborted"))); }

  Status write_at(const uint8_t* bytes, int64_t size, int64_t offset) override {
    return parts_->write(bytes, size, offset);
  }

  Status finish(int64_t size) override {
    parts_->end();
    return with_python<bool>("put", path_, text(size, " bytes"),
                             [&]() -> Result<bool> {
                               (*future_).attr("result")();
                               return true;
                             })
        .status();
  }

 private:
  const std::string path_;
  const std::shared_ptr<io::UploadParts> parts_;
  const PythonReference future_;
};

class PythonStore : public io::ObjectStore, public io::MemoryObjects {
 public:
  PythonStore(std::string url, py::object client)
      : url_(std::move(url)), is_in_memory_(py::hasattr(client, "descriptor")), client_(std::move(client)) {}

  io::MemoryObjects* in_memory() override { return is_in_memory_ ? this : nullptr; }

  Result<int> descriptor(const std::string& name) override {
    return with_python<int>("open", path_of(name), "",
                            [&]() -> Result<int> { return (*client_).attr("descriptor")(name).cast<int>(); });
  }

  Result<int> spare(const std::string& name) override {
    return with_python<int>("put", path_of(name), "",
                            [&]() -> Result<int> { return (*client_).attr("spare")(name).cast<int>(); });
  }

  Status reserve(const std::string& name, int64_t bytes, int64_t there) override {
    return with_python<bool>("reserve", path_of(name), text(bytes, " bytes"),
                             [&]() -> Result<bool> {
                               (*client_).attr("reserve")(name, bytes, there);
                               return true;
                             })
        .status();
  }

  Status keep(const std::string& name, int fd) override {
    return with_python<bool>("put", path_of(name), "",
                             [&]() -> Result<bool> {
                               (*client_).attr("keep")(name, fd);
                               return true;
                             })
        .status();
  }

  Result<Object> open(const std::string& name) override {
    return with_python<Object>("open", path_of(name), "", [&]() -> Result<Object> {
      const auto [bytes, version] = (*client_).attr("open")(name).cast<std::pair<int64_t, std::string>>();
      return Object{bytes, version};
    });
  }

  Result<int64_t> read(const std::string& name, const Object& object, uint8_t* to, int64_t size,
                       int64_t offset) override {
    const std::string detail = text("offset=", offset, ", ", size, " bytes");
    return with_python<int64_t>("get", path_of(name), detail, [&]() -> Result<int64_t> {
      const py::object got = (*client_).attr("read")(name, object.version, offset, size);
      Py_buffer view;
      if (PyObject_GetBuffer(got.ptr(), &view, PyBUF_SIMPLE) != 0) throw py::error_already_set();
      const int64_t bytes = std::min(size, static_cast<int64_t>(view.len));
      {
        const WithoutGil no_gil;
        std::memcpy(to, view.buf, static_cast<size_t>(bytes));
      }
      PyBuffer_Release(&view);
      return bytes;
    });
  }

  Result<std::unique_ptr<io::Upload>> create(const std::string& name) override {
    return with_python<std::unique_ptr<io::Upload>>(
        "put", path_of(name), "", [&]() -> Result<std::unique_ptr<io::Upload>> {
          const auto parts = std::make_shared<io::UploadParts>(staging::kSlotBytes);
          py::object future = (*client_).attr("upload")(name, py::cast(parts));
          return std::unique_ptr<io::Upload>(new PythonUpload(path_of(name), parts, std::move(future)));
        });
  }

  Status copy(const std::string& from, const std::string& name) override {
    return with_python<bool>("copy", from, "to " + path_of(name),
                             [&]() -> Result<bool> {
                               (*client_).attr("copy")(from, name);
                               return true;
                             })
        .status();
  }

  Result<std::vector<std::string>> list(const std::string& folder) override {
    return with_python<std::vector<std::string>>(
        "list", folder.empty() ? url_ : path_of(folder), "", [&]() -> Result<std::vector<std::string>> {
          return (*client_).attr("names")(folder).cast<std::vector<std::string>>();
        });
  }

 private:
  std::string path_of(const std::string& name) const { return io::join(url_, name); }

  const std::string url_;
  const bool is_in_memory_;
  const PythonReference client_;
};

}  // namespace

std::shared_ptr<io::ObjectStore> python_store(std::string url, py::object client) {
  return std::make_shared<PythonStore>(std::move(url), std::move(client));
}

}  // namespace bytecheckpoint::bridge
