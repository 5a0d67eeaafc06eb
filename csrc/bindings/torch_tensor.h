// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Python.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::bindings {

/// Is it an instance of torch.Tensor?
bool is_tensor(PyObject* object);

/// What plans need of a tensor beside its memory.
struct TensorFacts {
  tensor::DType dtype = tensor::DType::kNone;  // none if its elements need torch.save
  bool requires_grad = false;
  bool is_strided = false;
  tensor::Dims sizes;
};

/// Of a tensor of any type and device. Needs the GIL.
TensorFacts facts_of_tensor(PyObject* tensor);

bool is_meta_tensor(PyObject* tensor);
/// In page-locked memory? Of a plain tensor.
bool is_pinned(PyObject* tensor);

/// Are its elements its own host memory, strided, of a dtype in the format, and what they seem: neither conjugate nor
/// negative views? Of a plain tensor.
bool is_host_memory(PyObject* tensor);
/// The same for memory of a CUDA device: its number; nothing if it is none. Of a plain tensor.
std::optional<int> cuda_device_of(PyObject* tensor);

/// dtype and `requires_grad` of any tensor, as a number that another process of the same torch understands.
int64_t kind_of_tensor(PyObject* tensor);

/// A torch.Tensor or Parameter itself, rather than a subclass whose elements may mean something else than its memory?
bool is_plain_tensor(PyObject* object);

/// Tells autograd that tensors were written to behind its back.
void increment_versions(const std::vector<PyObject*>& tensors);

/// The host memory of a torch tensor.
///
/// \param writable  The caller will write through the view: memory shared copy-on-write is made the tensor's own.
/// \returns kInvalidArgument unless `object` is a dense, strided CPU tensor without pending conjugation or negation,
/// of a dtype in the format; the message says what it is instead. Needs the GIL; the view does not keep the tensor
/// alive.
base::Result<tensor::StridedView> view_of_tensor(PyObject* object, bool writable);

/// The same for reading, and only of a torch.Tensor or Parameter itself: the elements of a subclass may mean something
/// else than its memory.
base::Result<tensor::StridedView> view_of_plain_tensor(PyObject* object);

/// The same of a tensor in the memory of a CUDA device.
base::Result<tensor::StridedView> view_of_cuda_tensor(PyObject* object);

/// What keeps memory mapped until the last tensor in it is gone: one allocation for all of them.
class MemoryOwner {
 public:
  explicit MemoryOwner(std::shared_ptr<void> owner) : users_(new Users{{1}, std::move(owner)}) {}
  ~MemoryOwner() { drop(users_); }
  MemoryOwner(const MemoryOwner&) = delete;
  MemoryOwner& operator=(const MemoryOwner&) = delete;

  /// One more user, for `drop`.
  void* add() const {
    users_->count.fetch_add(1, std::memory_order_relaxed);
    return users_;
  }
  static void drop(void* users);

 private:
  struct Users {
    std::atomic<int64_t> count;
    std::shared_ptr<void> owner;
  };
  Users* const users_;
};

/// A torch.Tensor of host memory that is not there yet, contiguous, of the kind of another tensor.
class PendingTensor {
 public:
  /// \param like  Gives shape, dtype and `requires_grad`; of any device. Needs the GIL.
  explicit PendingTensor(PyObject* like);
  /// \param kind  From `kind_of_tensor`.
  PendingTensor(tensor::Dims sizes, int64_t kind);

  PyObject* object() const { return object_.get(); }
  /// Gives it its memory. Needs no GIL, but nobody may look at the tensor before.
  void settle(uint8_t* memory, const MemoryOwner& owner);

 private:
  struct Drop {
    void operator()(PyObject* object) const;
  };
  std::unique_ptr<PyObject, Drop> object_;
};

/// Shape of any tensor, also one without memory here; nothing if `object` is none.
std::optional<tensor::Dims> sizes_of_tensor(PyObject* object);

}  // namespace bytecheckpoint::bindings
