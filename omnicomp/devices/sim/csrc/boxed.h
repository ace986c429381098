// Operators that are called as a stack of values, whatever their signature.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sim {

// The host's kernel, run inside one launch on the device's own memory. It plays the library of kernels that comes with
// a device: nothing goes through the host's memory. New results are made on the device.
void library(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace sim
