// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/torch_tensor.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Allocator.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <string_view>

#include "csrc/base/bytes.h"

namespace bytecheckpoint::bridge {
namespace {

using base::Code;
using base::Status;
using base::text;

struct ScalarName {
  std::string_view torch_name;  // as c10::toString returns it
  tensor::DType dtype;
};

// By name, not by enumerator: older versions of torch lack some of them.
constexpr ScalarName kScalarNames[] = {
    {"Double", tensor::DType::kFloat64},
    {"Float", tensor::DType::kFloat32},
    {"Half", tensor::DType::kFloat16},
    {"BFloat16", tensor::DType::kBFloat16},
    {"Long", tensor::DType::kInt64},
    {"Int", tensor::DType::kInt32},
    {"Short", tensor::DType::kInt16},
    {"Char", tensor::DType::kInt8},
    {"Byte", tensor::DType::kUInt8},
    {"Bool", tensor::DType::kBool},
    {"ComplexFloat", tensor::DType::kComplex64},
    {"ComplexDouble", tensor::DType::kComplex128},
    {"ComplexHalf", tensor::DType::kComplex32},
    {"BComplex32", tensor::DType::kBComplex32},
    {"UInt16", tensor::DType::kUInt16},
    {"UInt32", tensor::DType::kUInt32},
    {"UInt64", tensor::DType::kUInt64},
    {"Float8_e4m3fn", tensor::DType::kFloat8E4M3FN},
    {"Float8_e4m3fnuz", tensor::DType::kFloat8E4M3FNUZ},
    {"Float8_e5m2", tensor::DType::kFloat8E5M2},
    {"Float8_e5m2fnuz", tensor::DType::kFloat8E5M2FNUZ},
    {"Float8_e8m0fnu", tensor::DType::kFloat8E8M0FNU},
    {"Float4_e2m1fn_x2", tensor::DType::kFloat4E2M1FNX2},
};

using DTypeTable = std::array<tensor::DType, static_cast<size_t>(c10::ScalarType::NumOptions)>;

DTypeTable make_table() {
  DTypeTable table{};
  for (size_t i = 0; i < table.size(); ++i) {
    const std::string_view name = c10::toString(static_cast<c10::ScalarType>(i));
    for (const ScalarName& known : kScalarNames) {
      if (name == known.torch_name) table[i] = known.dtype;
    }
  }
  return table;
}

Status refuse(const std::string& why) {
  return Status::make(Code::kInvalidArgument, why);
}

tensor::DType dtype_of(const at::Tensor& tensor) {
  static const DTypeTable kTable = make_table();
  return kTable[static_cast<size_t>(tensor.scalar_type())];
}

bool is_its_memory(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && !tensor.is_nested() && !tensor.is_quantized() && !tensor.is_conj() &&
         !tensor.is_neg() && dtype_of(tensor) != tensor::DType::kNone;
}

constexpr int64_t kRequiresGrad = 1 << 8;

int64_t kind_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.scalar_type()) | (tensor.requires_grad() ? kRequiresGrad : 0);
}

}  // namespace

bool is_tensor(PyObject* object) {
  return THPVariable_Check(object);
}

bool is_plain_tensor(PyObject* object) {
  return THPVariable_CheckExact(object);
}

bool is_meta_tensor(PyObject* object) {
  return THPVariable_Unpack(object).is_meta();
}

bool is_host_memory(PyObject* object) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  return tensor.device().is_cpu() && is_its_memory(tensor);
}

std::optional<int> cuda_device_of(PyObject* object) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (!tensor.device().is_cuda() || !is_its_memory(tensor)) return std::nullopt;
  return tensor.device().index();
}

int64_t kind_of_tensor(PyObject* object) {
  return kind_of(THPVariable_Unpack(object));
}

bool is_pinned(PyObject* object) {
  // is_pinned costs more than all else that is read of a tensor, so it is called only if there may be an accelerator.
  static const bool kCanBe = at::getAccelerator(false).has_value();
  if (!kCanBe) return false;
  try {
    return THPVariable_Unpack(object).is_pinned();
  } catch (const c10::Error&) {
    return false;  // CUDA does not answer in a forked child, nor after a fault of the device
  }
}

TensorFacts facts_of_tensor(PyObject* object) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  TensorFacts facts;
  facts.dtype = tensor.is_quantized() ? tensor::DType::kNone : dtype_of(tensor);
  facts.requires_grad = tensor.requires_grad();
  facts.is_strided = tensor.layout() == c10::kStrided;
  facts.sizes = tensor::Dims(tensor.sizes().begin(), tensor.sizes().end());
  return facts;
}

uintptr_t storage_of(PyObject* object) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  return tensor.has_storage() ? reinterpret_cast<uintptr_t>(tensor.storage().data()) : 0;
}

void increment_versions(const std::vector<PyObject*>& tensors) {
  for (PyObject* object : tensors) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

namespace {

/// Returns how far the elements of a strided tensor reach in its storage, in bytes. Torch has no negative strides.
int64_t reach_bytes(const at::Tensor& tensor) {
  const auto itemsize = static_cast<int64_t>(tensor.itemsize());
  int64_t last = tensor.storage_offset(), bytes = 0, steps = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    const bool fits =
        base::checked_mul(tensor.size(d) - 1, tensor.stride(d), &steps) && base::checked_add(last, steps, &last);
    if (!fits) return INT64_MAX;
  }
  return base::checked_add(last, 1, &last) && base::checked_mul(last, itemsize, &bytes) ? bytes : INT64_MAX;
}

/// See `check_memory`.
Status check_storage(const at::Tensor& tensor) {
  const bool has_addresses = tensor.device().is_cpu() || tensor.device().is_cuda();
  if (tensor.numel() == 0 || !has_addresses) return Status::ok();
  const int64_t wanted = reach_bytes(tensor);
  const int64_t got = tensor.has_storage() ? static_cast<int64_t>(tensor.storage().nbytes()) : 0;
  if (wanted <= got && tensor.storage().data() != nullptr) return Status::ok();
  const bool has_any = got != 0 && tensor.storage().data() != nullptr;
  return refuse(text(has_any ? "the tensor is longer than its memory" : "the tensor has no memory", ": it needs ",
                     wanted, " bytes of its storage, which has ", has_any ? got : 0,
                     "; the storage was freed or shrunk (untyped_storage().resize_), so give it its bytes back first"));
}

/// Whether torch has allocated the memory of a CPU tensor, which then can be written to.
bool is_of_torch(const at::Tensor& tensor) {
  static const c10::DeleterFnPtr kDeleter = c10::GetAllocator(c10::kCPU)->raw_deleter();
  return kDeleter != nullptr && tensor.storage().data_ptr().get_deleter() == kDeleter;
}

base::Result<tensor::StridedView> view_of_memory(const at::Tensor& tensor, bool writable) {
  if (tensor.layout() != c10::kStrided) return refuse("must be a strided tensor, got a sparse or opaque layout");
  if (tensor.is_quantized()) return refuse("quantized tensors are not stored yet");
  if (tensor.is_conj() || tensor.is_neg())
    return refuse("the tensor has a pending conjugation or negation; call resolve_conj() or resolve_neg() first");
  const tensor::DType dtype = dtype_of(tensor);
  if (dtype == tensor::DType::kNone) {
    return refuse(text("dtype ", c10::toString(tensor.scalar_type()), " is not in the format"));
  }
  tensor::StridedView view;
  view.dtype = dtype;
  const int64_t itemsize = tensor::find_dtype(dtype)->itemsize_bytes;
  view.sizes = tensor::Dims(tensor.sizes().begin(), tensor.sizes().end());
  for (const int64_t stride : tensor.strides()) view.strides_bytes.push_back(stride * itemsize);
  if (tensor.numel() != 0) {
    BCP_RETURN_IF_ERROR(check_storage(tensor));
    const void* data = writable ? tensor.mutable_data_ptr() : tensor.const_data_ptr();
    view.data = static_cast<uint8_t*>(const_cast<void*>(data));
  }
  return view;
}

}  // namespace

Status check_memory(PyObject* object, base::ReadOnlyMemory* read_only) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (tensor.layout() != c10::kStrided || tensor.is_nested()) return Status::ok();
  BCP_RETURN_IF_ERROR(check_storage(tensor));
  if (read_only == nullptr || !tensor.device().is_cpu() || tensor.numel() == 0 || is_of_torch(tensor)) {
    return Status::ok();
  }
  const auto itemsize = static_cast<int64_t>(tensor.itemsize());
  const int64_t begin = tensor.storage_offset() * itemsize;
  const auto* const storage = static_cast<const uint8_t*>(tensor.storage().data());
  if (!read_only->has(storage + begin, reach_bytes(tensor) - begin)) return Status::ok();
  return refuse(
      "the tensor is in memory that can only be read, such as a file that is mapped for reading; clone() it first");
}

bool is_still_memory_of(PyObject* object, const tensor::StridedView& view) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  return check_storage(tensor).is_ok() && (tensor.numel() == 0 || tensor.const_data_ptr() == view.data);
}

base::Result<tensor::StridedView> view_of_tensor(PyObject* object, bool writable) {
  if (!THPVariable_Check(object)) return refuse(text("must be a tensor, got a ", Py_TYPE(object)->tp_name));
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (tensor.layout() == c10::kStrided && !tensor.device().is_cpu()) {
    return refuse(text("must be a CPU tensor, got one on ", tensor.device().str()));
  }
  return view_of_memory(tensor, writable);
}

base::Result<tensor::StridedView> view_of_plain_tensor(PyObject* object) {
  if (!THPVariable_CheckExact(object)) return refuse(text("must be a plain tensor, got a ", Py_TYPE(object)->tp_name));
  return view_of_tensor(object, /*writable=*/false);
}

base::Result<tensor::StridedView> view_of_cuda_tensor(PyObject* object, bool writable) {
  if (!THPVariable_CheckExact(object)) return refuse(text("must be a plain tensor, got a ", Py_TYPE(object)->tp_name));
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (!tensor.device().is_cuda()) return refuse(text("must be a CUDA tensor, got one on ", tensor.device().str()));
  return view_of_memory(tensor, writable);
}

namespace {

PyObject* make_pending(c10::IntArrayRef sizes, int64_t kind) {
  const auto dtype = c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(kind & (kRequiresGrad - 1)));
  const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * dtype.itemsize();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, c10::kCPU));
  at::Tensor tensor =
      at::detail::make_tensor<at::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if ((kind & kRequiresGrad) != 0) tensor.set_requires_grad(true);
  PyObject* const object = THPVariable_Wrap(std::move(tensor));
  // It refers to no object. Tracked, thousands of them would only make the garbage collector look at all objects.
  PyObject_GC_UnTrack(object);
  return object;
}

}  // namespace

PendingTensor::PendingTensor(PyObject* like)
    : object_(make_pending(THPVariable_Unpack(like).sizes(), kind_of(THPVariable_Unpack(like)))) {}

PendingTensor::PendingTensor(tensor::Dims sizes, int64_t kind)
    : object_(make_pending(c10::IntArrayRef(sizes.data(), sizes.size()), kind)) {}

void PendingTensor::Drop::operator()(PyObject* object) const {
  Py_DECREF(object);
}

void MemoryOwner::drop(void* users) {
  auto* const of = static_cast<Users*>(users);
  if (of->count.fetch_sub(1, std::memory_order_acq_rel) == 1) delete of;
}

void PendingTensor::settle(uint8_t* memory, const MemoryOwner& owner) {
  const c10::Storage& storage = THPVariable_Unpack(object_.get()).storage();
  storage.set_data_ptr_noswap(c10::DataPtr(memory, owner.add(), &MemoryOwner::drop, c10::Device(c10::kCPU)));
}

std::optional<tensor::Dims> sizes_of_tensor(PyObject* object) {
  if (!THPVariable_Check(object)) return std::nullopt;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const auto sizes = tensor.sizes();
  return tensor::Dims(sizes.begin(), sizes.end());
}

}  // namespace bytecheckpoint::bridge
