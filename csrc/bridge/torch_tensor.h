// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Python.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/base/read_only_memory.h"
#include "csrc/base/status.h"
#include "csrc/tensor/strided_view.h"

namespace bytecheckpoint::bridge {

/// Whether the object is an instance of torch.Tensor.
bool is_tensor(PyObject* object);

/// What plans need to know about a tensor, besides its memory.
struct TensorFacts {
  tensor::DType dtype = tensor::DType::kNone;  // none if its elements need torch.save
  bool requires_grad = false;
  bool is_strided = false;
  tensor::Dims sizes;
};

/// Reads the facts of a tensor of any type and device. Needs the GIL.
TensorFacts facts_of_tensor(PyObject* tensor);

/// Whether a tensor is on the meta device, and so has no memory.
bool is_meta_tensor(PyObject* tensor);
/// Whether a plain tensor is in page-locked memory.
bool is_pinned(PyObject* tensor);

/// Whether the memory of a plain tensor is in host memory and holds its elements as they are: strided, of a dtype in
/// the format, and neither a conjugate nor a negative view.
bool is_host_memory(PyObject* tensor);
/// The same for memory of a CUDA device. Returns the number of the device; nothing if it is not such a tensor.
std::optional<int> cuda_device_of(PyObject* tensor);

/// Returns dtype and `requires_grad` of any tensor as a number, which another process with the same torch understands.
int64_t kind_of_tensor(PyObject* tensor);

/// Whether the object is a torch.Tensor or Parameter, and not of a subclass, whose elements may mean something else
/// than its memory.
bool is_plain_tensor(PyObject* object);

/// Returns the address at which the storage of a tensor begins. Parts of one tensor have the same.
uintptr_t storage_of(PyObject* tensor);

/// Tells autograd that these tensors were written to without it.
void increment_versions(const std::vector<PyObject*>& tensors);

/// Checks that all elements of a plain tensor are inside its storage, which may have been freed or shrunk under it.
/// Needs the GIL.
///
/// \param read_only  If it is given, the tensor is to be filled, and its memory must not be in there.
/// \returns kInvalidArgument, with the bytes that the tensor needs and those that its storage has. Tensors that are not
/// strided, or on other devices than the CPU and CUDA's, pass.
base::Status check_memory(PyObject* tensor, base::ReadOnlyMemory* read_only = nullptr);

/// Whether `view`, which was once returned for a plain tensor, still is its memory. Needs the GIL.
bool is_still_memory_of(PyObject* tensor, const tensor::StridedView& view);

/// Returns the host memory of a torch tensor. Needs the GIL. The view does not keep the tensor alive.
///
/// \param writable  The caller will write through the view. Memory that is shared copy-on-write is then copied first.
/// \returns kInvalidArgument unless `object` is a dense, strided CPU tensor of a dtype in the format, without pending
/// conjugation or negation. The message says what it is instead.
base::Result<tensor::StridedView> view_of_tensor(PyObject* object, bool writable);

/// The same for reading, and only for a torch.Tensor or Parameter, not a subclass.
base::Result<tensor::StridedView> view_of_plain_tensor(PyObject* object);

/// The same for a tensor in the memory of a CUDA device. \param writable  See `view_of_tensor`.
base::Result<tensor::StridedView> view_of_cuda_tensor(PyObject* object, bool writable);

/// Keeps memory mapped until the last tensor in it is gone, with one allocation for all of these tensors. Thread-safe.
class MemoryOwner {
 public:
  explicit MemoryOwner(std::shared_ptr<void> owner) : users_(new Users{{1}, std::move(owner)}) {}
  ~MemoryOwner() { drop(users_); }
  MemoryOwner(const MemoryOwner&) = delete;
  MemoryOwner& operator=(const MemoryOwner&) = delete;

  /// Adds a user of the memory. Returns the context that its `drop` call needs.
  void* add() const {
    users_->count.fetch_add(1, std::memory_order_relaxed);
    return users_;
  }
  /// Removes a user. The last one releases the memory.
  static void drop(void* users);

 private:
  struct Users {
    std::atomic<int64_t> count;
    std::shared_ptr<void> owner;
  };
  Users* const users_;
};

/// A contiguous torch.Tensor in host memory that it gets only by `settle`, of the kind of another tensor.
class PendingTensor {
 public:
  /// \param like  Any tensor, on any device: gives shape, dtype and `requires_grad`. Needs the GIL.
  explicit PendingTensor(PyObject* like);
  /// \param kind  From `kind_of_tensor`.
  PendingTensor(tensor::Dims sizes, int64_t kind);

  PyObject* object() const { return object_.get(); }
  /// Gives the tensor its memory. Needs no GIL, but nobody may use the tensor before.
  void settle(uint8_t* memory, const MemoryOwner& owner);

 private:
  struct Drop {
    void operator()(PyObject* object) const;
  };
  std::unique_ptr<PyObject, Drop> object_;
};

/// Returns the shape of any tensor, also of one without memory; nothing if `object` is no tensor.
std::optional<tensor::Dims> sizes_of_tensor(PyObject* object);

}  // namespace bytecheckpoint::bridge
