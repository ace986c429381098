// What the device has no kernel of its own for: a library on its own memory, and the fallback to the host.
#include "boxed.h"

#include "alias.h"
#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/List.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <optional>
#include <set>

namespace sim {
namespace {

using c10::IValue;
using torch::jit::Stack;

// Calls `use` with every tensor of a value, lists of tensors and of optional tensors included.
template <typename F>
void each_tensor(const IValue& value, F use) {
  if (value.isTensor()) {
    use(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      use(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      if (tensor) {
        use(*tensor);
      }
    }
  }
}

// The value with every tensor exchanged.
template <typename F>
IValue map_tensors(const IValue& value, F exchange) {
  if (value.isTensor()) {
    return exchange(value.toTensor());
  }
  if (value.isTensorList()) {
    std::vector<at::Tensor> result;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      result.push_back(exchange(tensor));
    }
    return result;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> result;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
      result.push_back(tensor ? std::optional<at::Tensor>(exchange(*tensor)) : std::nullopt);
    }
    return result;
  }
  return value;
}

// Arguments that torch's accelerators take from the host: indices, and lengths that steer the host's own loops.
bool may_be_on_host(const c10::FunctionSchema& schema, const c10::Argument& argument) {
  static const std::set<std::string> index_operators{
      "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
      "aten::_unsafe_index_put"};
  static const std::set<std::string> lengths{
      "lengths", "batch_sizes", "input_lengths", "target_lengths", "seqlens", "state_steps"};
  if (lengths.count(argument.name()) != 0) {
    return true;
  }
  return argument.name() == "indices" && index_operators.count(schema.name()) != 0;
}

// Between two places on purpose.
bool is_copy(const std::string& name) {
  static const std::set<std::string> names{"aten::_copy_from", "aten::_copy_from_and_resize", "aten::copy_"};
  return names.count(name) != 0;
}

bool takes_generator(const c10::Argument& argument) {
  const auto& type = *argument.type();
  return type.kind() == c10::TypeKind::GeneratorType ||
      (type.kind() == c10::TypeKind::OptionalType &&
       type.castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType);
}

// While it lives, the host's default generator is in the state of the device's: for operators that draw random numbers
// and have no argument to say from what.
class BorrowedGenerator {
 public:
  explicit BorrowedGenerator(at::Generator device)
      : twin_(host_twin(device)), host_(at::detail::getDefaultCPUGenerator()), saved_(host_.get_state()) {
    host_.set_state(twin_.get_state());
  }
  ~BorrowedGenerator() {
    twin_.set_state(host_.get_state());
    host_.set_state(saved_);
  }
  BorrowedGenerator(const BorrowedGenerator&) = delete;
  BorrowedGenerator& operator=(const BorrowedGenerator&) = delete;

 private:
  at::Generator twin_, host_;
  at::Tensor saved_;
};

// Puts host generators into the arguments. Returns whether the operator draws from the default one without saying so.
bool exchange_generators(const c10::OperatorHandle& op, Stack* stack, c10::Device device) {
  const auto& arguments = op.schema().arguments();
  const auto first = stack->size() - arguments.size();
  bool has_argument = false;
  for (size_t i = 0; i < arguments.size(); i++) {
    if (takes_generator(arguments[i])) {
      has_argument = true;
      IValue& value = (*stack)[first + i];
      const auto generator = value.isNone() ? default_generator(device.index()) : value.toGenerator();
      value = host_twin(generator);
    }
  }
  return !has_argument && op.hasTag(at::Tag::nondeterministic_seeded);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto device = common_device(op, *stack);
  const c10::OptionalDeviceGuard guard(device);
  count_fallback(c10::toString(op.operator_name()));
  std::optional<BorrowedGenerator> borrowed;
  if (exchange_generators(op, stack, device)) {
    borrowed.emplace(default_generator(device.index()));
  }
  at::native::cpu_fallback(op, stack);
}

} // namespace

at::Tensor to_device(const at::Tensor& made, c10::Device device, bool contiguous) {
  if (!made.defined() || !made.device().is_cpu()) {
    return made;
  }
  const auto options = made.options().device(device);
  auto result = contiguous ? at::empty(made.sizes(), options) : at::empty_strided(made.sizes(), made.strides(), options);
  host_alias(result).copy_(made);
  return result;
}

c10::Device one_device(const char* name, std::initializer_list<at::Tensor> tensors) {
  std::optional<c10::Device> device;
  for (const auto& tensor : tensors) {
    if (tensor.defined()) {
      device = device.value_or(tensor.device());
      TORCH_CHECK(
          tensor.device() == *device && device->type() == kType,
          "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
          tensor.device(), "! (when calling ", name, ")");
    }
  }
  return device.value_or(c10::Device(kType, current_device()));
}

c10::Device common_device(const c10::OperatorHandle& op, const Stack& stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  std::optional<c10::Device> device;
  std::optional<c10::Device> other;
  for (size_t i = 0; i < arguments.size(); i++) {
    const bool written = arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite();
    const bool lenient = may_be_on_host(schema, arguments[i]);
    each_tensor(stack[stack.size() - arguments.size() + i], [&](const at::Tensor& tensor) {
      if (!tensor.defined()) {
        return;
      }
      const auto here = tensor.device();
      if (here.type() == kType && (!device || *device == here)) {
        device = here;
      } else if (here.type() == kType || !here.is_cpu() || (!lenient && (tensor.dim() != 0 || written))) {
        other = here;
      }
    });
  }
  TORCH_CHECK(
      !device || !other || is_copy(schema.name()),
      "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", *other,
      "! (when calling ", schema.name(), ")");
  return device.value_or(c10::Device(kType, current_device()));
}

void library(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto device = common_device(op, *stack);
  const c10::OptionalDeviceGuard guard(device);
  const auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  const Kernel launch(c10::toString(op.operator_name()));
  Stack inner;
  std::vector<std::pair<at::Tensor, at::Tensor>> outputs;
  for (size_t i = 0; i < arguments.size(); i++) {
    if (schema.arguments()[i].is_out() && arguments[i].isTensor()) {
      outputs.emplace_back(arguments[i].toTensor(), resizable_alias(arguments[i].toTensor()));
      inner.push_back(outputs.back().second);
    } else {
      inner.push_back(map_tensors(arguments[i], host_alias));
    }
  }
  std::optional<BorrowedGenerator> borrowed;
  if (exchange_generators(op, &inner, device)) {
    borrowed.emplace(default_generator(device.index()));
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &inner);
  for (const auto& [tensor, seen] : outputs) {
    adopt_size(tensor, seen);
  }
  for (size_t i = 0; i < schema.returns().size(); i++) {
    const auto* alias = schema.returns()[i].alias_info();
    std::optional<IValue> same;
    for (size_t j = 0; alias != nullptr && j < arguments.size(); j++) {
      const auto* of = schema.arguments()[j].alias_info();
      if (of != nullptr && of->beforeSets() == alias->beforeSets()) {
        same = arguments[j];
      }
    }
    stack->push_back(
        same ? *same : map_tensors(inner[i], [&](const at::Tensor& made) { return to_device(made, device); }));
  }
}

namespace {

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// The operators that the library has. Those with out= are structured: torch makes the other forms of them itself. (The
// structured form of mse_loss gives its out= two sizes in turn, with a warning; so it is taken without.) Batch norms are
// here as their schemas do not say that running statistics are written: what runs on copies would lose that.
constexpr std::array kLibrary{
    "mm.out", "addmm.out", "bmm.out", "baddbmm.out", "addmv.out",
    "sum.IntList_out", "mean.out",
    "_softmax_backward_data.out", "_log_softmax_backward_data.out", "native_layer_norm_backward",
    "native_batch_norm", "native_batch_norm.out", "native_batch_norm_backward", "batch_norm_update_stats",
    "mse_loss", "mse_loss_backward", "nll_loss_forward.output", "nll_loss_backward.grad_input",
};

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const auto* name : kLibrary) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&library>());
  }
}

} // namespace
} // namespace sim
