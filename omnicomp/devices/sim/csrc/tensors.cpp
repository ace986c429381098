// Making tensors, looking at them in other ways, and moving their contents.
#include "alias.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace sim {

namespace {

// Memory of the current device, under the name of host memory.
struct AliasAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto made = allocator()->allocate(bytes);
    made.unsafe_set_device(c10::Device(c10::DeviceType::CPU));
    return made;
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return allocator()->raw_deleter();
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

at::Tensor alias(const at::Tensor& tensor, c10::Allocator* resize_with) {
  if (!on_device(tensor)) {
    return tensor;
  }
  // A storage of all bytes, so that what reads around the view (as_strided) finds the same as on the device.
  const auto storage = tensor.storage();
  c10::DataPtr pointer(storage.mutable_data(), c10::Device(c10::DeviceType::CPU));
  c10::Storage same(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer), resize_with, resize_with != nullptr);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  result._set_conj(tensor.is_conj());
  result._set_neg(tensor.is_neg());
  return result;
}

} // namespace

at::Tensor host_alias(const at::Tensor& tensor) {
  return alias(tensor, nullptr);
}

at::Tensor resizable_alias(const at::Tensor& tensor) {
  static auto* allocator = new AliasAllocator();
  return alias(tensor, allocator);
}

void adopt_size(const at::Tensor& tensor, const at::Tensor& alias) {
  if (!on_device(tensor)) {
    return;
  }
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto* other = alias.storage().unsafeGetStorageImpl();
  if (storage->data() != other->data()) {
    auto fresh = other->set_data_ptr(c10::DataPtr());
    fresh.unsafe_set_device(tensor.device());
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(other->nbytes());
  }
  if (tensor.sizes() != alias.sizes() || tensor.strides() != alias.strides()) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
  }
}

namespace {

c10::Device device_or_current(std::optional<c10::Device> device) {
  TORCH_CHECK(!device || device->type() == kType, "expected a sim device, got ", *device);
  return device && device->has_index() ? *device : c10::Device(kType, current_device());
}

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty_memory_format(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "sim has strided tensors only");
  check_dtype(c10::dtype_or_default(dtype));
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "sim has strided tensors only");
  check_dtype(c10::dtype_or_default(dtype));
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), allocator(), kKeys,
      c10::dtype_or_default(dtype));
}

// Kernels that compute sizes and strides alone, and so may be the host's.
void by_metadata(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

void ensure_bytes(const at::Tensor& self, size_t bytes) {
  if (bytes > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  }
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat> format) {
  const auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  if (self.sizes() != size) {
    // Memory first: where there is none, the tensor stays as it is.
    if (c10::multiply_integers(size) != 0) {
      ensure_bytes(
          self, at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset()));
    }
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  }
  if (format) {
    TORCH_CHECK(*format != at::MemoryFormat::Preserve, "Unsupported memory format ", *format);
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  const auto at = offset.expect_int();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  at::native::checkSetStorage(self, source, at, sizes, strides);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(at);
  if (strides.data() == nullptr) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides);
  }
  if (self.numel() != 0) {
    ensure_bytes(self, at::detail::computeStorageNbytes(sizes, self.strides(), self.dtype().itemsize(), at));
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto count = int64_t(source.nbytes() / self.dtype().itemsize());
  return set_storage_offset(self, std::move(source), 0, c10::SymIntArrayRef(c10::SymInt(count)), {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.unsafeGetTensorImpl() == source.unsafeGetTensorImpl()) {
    return self;
  }
  return set_storage_offset(
      self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_tensor(self, at::empty({0}, self.options()));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  TORCH_CHECK(
      (on_device(self) || self.device().is_cpu()) && (on_device(to) || to.device().is_cpu()), "sim can't copy from ",
      self.device(), " to ", to.device());
  at::assert_no_partial_overlap(to, self); // the host's aliases are two storages, in which it would not see that
  if (to.numel() != 0) {
    Copy copy(self.device(), to.device(), size_t(to.numel()) * to.dtype().itemsize());
    const auto target = host_alias(to);
    target.copy_(host_alias(self));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  Copy copy(self.device(), c10::Device(c10::DeviceType::CPU), self.dtype().itemsize());
  return at::_local_scalar_dense(host_alias(self));
}

// Nothing is in flight on any stream, so memory may be used again as soon as it is freed.
void record_stream(at::Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  for (const auto* name : {"as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&by_metadata>());
  }
}

// A view that is conjugated or negated lazily is copied as it is, bits and all; without this, making it explicit copies
// it, which makes it explicit, and so on until the stack overflows.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace
} // namespace sim
