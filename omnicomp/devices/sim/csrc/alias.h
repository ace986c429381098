// The device's tensors as the host sees them: same memory, no copy. To be used inside of a Kernel or Copy only.
#pragma once

#include "runtime.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

namespace sim {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// A CPU tensor with the memory, sizes, strides and conjugate and negative bits of one on the device. What is not on the
// device is returned as it is.
at::Tensor host_alias(const at::Tensor& tensor);

// The same for one that may be resized, which then has other memory of the same device; and what makes that resizing
// the tensor's own.
at::Tensor resizable_alias(const at::Tensor& tensor);
void adopt_size(const at::Tensor& tensor, const at::Tensor& alias);

// What a kernel computed in its workspace on the host, on the device. Part of the launch, so to be used inside of one.
// Anything else, undefined tensors included, is returned as it is.
at::Tensor to_device(const at::Tensor& made, c10::Device device, bool contiguous = false);

// The device of all defined tensors; throws if they are not on one.
c10::Device one_device(const char* name, std::initializer_list<at::Tensor> tensors);

// Refuses a stack in which tensors of the host, of more than a number, stand beside tensors of the device, or tensors
// of two devices. Returns the device of all of them; the current one if there is no tensor.
c10::Device common_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

} // namespace sim
