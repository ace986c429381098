// torch.amp.autocast("sim"): torch's own lists of operators, each through one function for its policy.
#include "runtime.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <string>

namespace sim {
namespace {

using at::ScalarType;
using at::Tensor;
using at::autocast::CastPolicy;

c10::IValue cast(const c10::IValue& value, ScalarType type) {
  if (value.isTensor()) {
    return at::autocast::cached_cast(type, value.toTensor(), kType);
  }
  if (value.isTensorList()) {
    return at::autocast::cached_cast(type, at::TensorList(value.toTensorVector()), kType);
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> result;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
      result.push_back(at::autocast::cached_cast(type, tensor, kType));
    }
    return result;
  }
  return value;
}

// The widest dtype among the floats, at least autocast's own.
ScalarType widest(const std::vector<c10::IValue>& values) {
  auto type = at::autocast::get_lower_precision_fp_from_device_type(kType);
  for (const auto& value : values) {
    if (value.isTensor()) {
      type = at::autocast::prioritize(type, value.toTensor(), kType);
    } else if (value.isTensorList()) {
      const auto tensors = value.toTensorVector();
      type = at::autocast::prioritize(type, at::TensorList(tensors), kType);
    }
  }
  return type;
}

// Asks for a float32 result where the caller did not ask for any dtype.
void set_dtype(const c10::FunctionSchema& schema, std::vector<c10::IValue>& values) {
  const bool eligible = !values.empty() && values[0].isTensor() &&
      at::autocast::is_autocast_eligible(values[0].toTensor(), kType);
  for (size_t i = 0; eligible && i < values.size(); i++) {
    if (schema.arguments()[i].name() == "dtype" && values[i].isNone()) {
      values[i] = ScalarType::Float;
    }
  }
}

template <CastPolicy policy>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  auto values = torch::jit::pop(*stack, op.schema().arguments().size());
  if constexpr (policy == CastPolicy::fp32_set_opt_dtype) {
    set_dtype(op.schema(), values);
  } else {
    auto type = ScalarType::Float;
    if constexpr (policy == CastPolicy::lower_precision_fp) {
      type = at::autocast::get_lower_precision_fp_from_device_type(kType);
    } else if constexpr (policy == CastPolicy::promote) {
      type = widest(values);
    }
    for (auto& value : values) {
      value = cast(value, type);
    }
  }
  for (auto& value : values) {
    stack->push_back(std::move(value));
  }
  op.callBoxed(stack);
}

// Its gradient leaves the range of half precision; refused as on torch's own accelerators.
void refuse(const c10::OperatorHandle&, torch::jit::Stack*) {
  TORCH_CHECK(
      false,
      "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Use "
      "binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, or disable autocast around the call.");
}

// "op" or "op, overload", as torch's lists have them.
template <CastPolicy policy>
void cover(torch::Library& m, std::string name) {
  if (const auto comma = name.find(", "); comma != std::string::npos) {
    name.replace(comma, 2, ".");
  }
  m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&autocast<policy>>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define SIM_LOWER(...) cover<CastPolicy::lower_precision_fp>(m, #__VA_ARGS__);
#define SIM_FP32(...) cover<CastPolicy::fp32>(m, #__VA_ARGS__);
#define SIM_FP32_BY_DTYPE(...) cover<CastPolicy::fp32_set_opt_dtype>(m, #__VA_ARGS__);
#define SIM_PROMOTE(...) cover<CastPolicy::promote>(m, #__VA_ARGS__);

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FP32_BY_DTYPE)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
  // These have no dtype argument; torch calls an overload that has one, which comes to the same.
  cover<CastPolicy::fp32>(m, "norm.Scalar");
  cover<CastPolicy::fp32>(m, "norm.ScalarOpt_dim");
  m.impl("binary_cross_entropy", torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

} // namespace
} // namespace sim
