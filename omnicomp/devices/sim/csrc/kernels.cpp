// The device's own kernels. Each takes the dtypes and layouts it was written for; others go to the library.
#include "alias.h"
#include "boxed.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorIterator.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/histc_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/threshold_backward_ops.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/MaybeOwned.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>

namespace sim {
namespace {

using at::Scalar;
using at::Tensor;

// The library's kernel of an operator and overload, with the signature of the operator.
#define SIM_LIBRARY(op, overload) at::native::call_fallback_fn<&library, at::_ops::op##_##overload>::call
#define SIM_FLOATS(...) AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, __VA_ARGS__)
#define SIM_REALS(...) AT_DISPATCH_ALL_TYPES_AND2(at::kHalf, at::kBFloat16, __VA_ARGS__)

bool is_real(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 ||
      (c10::isIntegralType(type, false) && type <= at::kLong) || type == at::kFloat || type == at::kDouble;
}
bool is_float(at::ScalarType type) {
  return is_real(type) && c10::isFloatingType(type);
}

// out[i] = op(inputs[i]...) over operands of one dtype, broadcast and strided as the iterator says.
template <typename T, typename Op, size_t... I>
void loop(at::TensorIteratorBase& iterator, Op op, std::index_sequence<I...>) {
  iterator.for_each([op](char** data, const int64_t* strides, int64_t n) {
    std::array<int64_t, sizeof...(I) + 1> step{};
    bool contiguous = true;
    for (size_t k = 0; k < step.size(); k++) {
      step[k] = strides[k];
      contiguous &= strides[k] == int64_t(sizeof(T));
    }
    if (contiguous) {
      auto* out = reinterpret_cast<T*>(data[0]);
      for (int64_t i = 0; i < n; i++) {
        out[i] = op(reinterpret_cast<const T*>(data[I + 1])[i]...);
      }
    } else {
      for (int64_t i = 0; i < n; i++) {
        *reinterpret_cast<T*>(data[0] + i * step[0]) =
            op(*reinterpret_cast<const T*>(data[I + 1] + i * step[I + 1])...);
      }
    }
  });
}

// Runs the loop as one launch. Makes or resizes `out` where it has to.
template <typename T, typename Op, typename... Inputs>
void launch(const char* name, Tensor& out, Op op, const Inputs&... inputs) {
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(true).allow_cpu_scalars(true).add_output(out);
  (config.add_const_input(inputs), ...);
  auto iterator = config.build();
  const c10::OptionalDeviceGuard guard(out.device());
  const Kernel kernel(name);
  loop<T>(iterator, op, std::index_sequence_for<Inputs...>());
}

// An operand of a binary operator in the common dtype: what is on the device is taken as it is or not at all, a number
// of the host is converted. Empty if there is no kernel for it.
std::optional<Tensor> operand(const Tensor& tensor, at::ScalarType common) {
  if (tensor.scalar_type() == common) {
    return tensor;
  }
  return tensor.device().is_cpu() && tensor.dim() == 0 ? std::optional<Tensor>(tensor.to(common)) : std::nullopt;
}

struct Binary {
  std::optional<Tensor> self, other;
  at::ScalarType common = at::kFloat;
  // Whether the device has a kernel for these operands and this result.
  explicit operator bool() const {
    return self && other && (on_device(*self) || on_device(*other));
  }
};

// The right operand in the precision that 16-bit floats are computed in, if it is a number of the host: what torch's own
// devices do, rather than round it to 16 bits first.
template <typename T>
std::optional<at::opmath_type<T>> wide_number(const Tensor& other) {
  const bool narrow = std::is_same_v<T, at::Half> || std::is_same_v<T, at::BFloat16>;
  if (!narrow || on_device(other) || other.dim() != 0) {
    return std::nullopt;
  }
  return other.item().to<at::opmath_type<T>>();
}

Binary binary(const Tensor& self, const Tensor& other, const Tensor& out, bool in_floats = false) {
  auto common = at::result_type(self, other);
  if (in_floats && c10::isIntegralType(common, true)) {
    common = c10::get_default_dtype_as_scalartype();
  }
  if (!is_real(common) || out.scalar_type() != common) {
    return Binary{std::nullopt, std::nullopt, common};
  }
  return Binary{operand(self, common), operand(other, common), common};
}

bool alpha_fits(const Scalar& alpha, at::ScalarType common) {
  return !alpha.isComplex() && !alpha.isBoolean() && (c10::isFloatingType(common) || alpha.isIntegral(false));
}

Tensor& add_out(const Tensor& self, const Tensor& other, const Scalar& alpha, Tensor& out) {
  const auto b = binary(self, other, out);
  if (!b || !alpha_fits(alpha, b.common)) {
    return SIM_LIBRARY(add, out)(self, other, alpha, out);
  }
  SIM_REALS(b.common, "add", [&] {
    using acc = at::opmath_type<scalar_t>;
    const auto factor = alpha.to<acc>();
    launch<scalar_t>(
        "aten::add.out", out, [factor](scalar_t x, scalar_t y) { return scalar_t(acc(x) + factor * acc(y)); },
        *b.self, *b.other);
  });
  return out;
}

Tensor& sub_out(const Tensor& self, const Tensor& other, const Scalar& alpha, Tensor& out) {
  const auto b = binary(self, other, out);
  if (!b || !alpha_fits(alpha, b.common)) {
    return SIM_LIBRARY(sub, out)(self, other, alpha, out);
  }
  SIM_REALS(b.common, "sub", [&] {
    using acc = at::opmath_type<scalar_t>;
    const auto factor = alpha.to<acc>();
    launch<scalar_t>(
        "aten::sub.out", out, [factor](scalar_t x, scalar_t y) { return scalar_t(acc(x) - factor * acc(y)); },
        *b.self, *b.other);
  });
  return out;
}

Tensor& mul_out(const Tensor& self, const Tensor& other, Tensor& out) {
  const auto b = binary(self, other, out);
  if (!b) {
    return SIM_LIBRARY(mul, out)(self, other, out);
  }
  SIM_REALS(b.common, "mul", [&] {
    using acc = at::opmath_type<scalar_t>;
    if (const auto number = wide_number<scalar_t>(other)) {
      launch<scalar_t>("aten::mul.out", out, [y = *number](scalar_t x) { return scalar_t(acc(x) * y); }, *b.self);
      return;
    }
    launch<scalar_t>(
        "aten::mul.out", out, [](scalar_t x, scalar_t y) { return scalar_t(acc(x) * acc(y)); }, *b.self, *b.other);
  });
  return out;
}

Tensor& div_out(const Tensor& self, const Tensor& other, Tensor& out) {
  const auto b = binary(self, other, out, true);
  if (!b || !is_float(b.common)) {
    return SIM_LIBRARY(div, out)(self, other, out);
  }
  SIM_FLOATS(b.common, "div", [&] {
    using acc = at::opmath_type<scalar_t>;
    if (const auto number = wide_number<scalar_t>(other)) {
      launch<scalar_t>("aten::div.out", out, [y = *number](scalar_t x) { return scalar_t(acc(x) / y); }, *b.self);
      return;
    }
    launch<scalar_t>(
        "aten::div.out", out, [](scalar_t x, scalar_t y) { return scalar_t(acc(x) / acc(y)); }, *b.self, *b.other);
  });
  return out;
}

Tensor& relu_into(const char* name, const Tensor& self, Tensor& out) {
  TORCH_CHECK(self.scalar_type() != at::kBool, "Boolean inputs not supported for relu");
  SIM_REALS(self.scalar_type(), "relu", [&] {
    // Written so that NaN stays NaN.
    launch<scalar_t>(name, out, [](scalar_t x) { return x < scalar_t(0) ? scalar_t(0) : x; }, self);
  });
  return out;
}
Tensor relu(const Tensor& self) {
  auto out = at::empty_like(self);
  return relu_into("aten::relu", self, out);
}
Tensor& relu_(Tensor& self) {
  return relu_into("aten::relu_", self, self);
}

Tensor& threshold_backward_out(const Tensor& grad, const Tensor& self, const Scalar& threshold, Tensor& out) {
  const auto type = self.scalar_type();
  if (!is_real(type) || grad.scalar_type() != type || out.scalar_type() != type) {
    return SIM_LIBRARY(threshold_backward, grad_input)(grad, self, threshold, out);
  }
  SIM_REALS(type, "threshold_backward", [&] {
    const auto limit = threshold.to<scalar_t>();
    launch<scalar_t>(
        "aten::threshold_backward.grad_input", out,
        [limit](scalar_t g, scalar_t x) { return x <= limit ? scalar_t(0) : g; }, grad, self);
  });
  return out;
}

// x * Phi(x), Phi the normal distribution's function; or its approximation by tanh (Hendrycks and Gimpel,
// arXiv:1606.08415).
constexpr double kSqrtHalf = 0.70710678118654752440;
constexpr double kSqrt2OverPi = 0.79788456080286535588;
constexpr double kCubic = 0.044715;
constexpr double kDensityAtZero = 0.39894228040143267794;

Tensor& gelu_out(const Tensor& self, c10::string_view approximate, Tensor& out) {
  const auto type = self.scalar_type();
  if (!is_float(type) || out.scalar_type() != type || (approximate != "none" && approximate != "tanh")) {
    return SIM_LIBRARY(gelu, out)(self, approximate, out);
  }
  const bool exact = approximate == "none";
  SIM_FLOATS(type, "gelu", [&] {
    using acc = at::opmath_type<scalar_t>;
    const auto gelu = [exact](scalar_t value) {
      const acc x = value;
      return scalar_t(
          exact ? x * acc(0.5) * (1 + std::erf(x * acc(kSqrtHalf)))
                : x * acc(0.5) * (1 + std::tanh(acc(kSqrt2OverPi) * (x + acc(kCubic) * x * x * x))));
    };
    launch<scalar_t>("aten::gelu.out", out, gelu, self);
  });
  return out;
}

Tensor& gelu_backward_out(const Tensor& grad, const Tensor& self, c10::string_view approximate, Tensor& out) {
  const auto type = self.scalar_type();
  if (!is_float(type) || grad.scalar_type() != type || out.scalar_type() != type ||
      (approximate != "none" && approximate != "tanh")) {
    return SIM_LIBRARY(gelu_backward, grad_input)(grad, self, approximate, out);
  }
  const bool exact = approximate == "none";
  SIM_FLOATS(type, "gelu_backward", [&] {
    using acc = at::opmath_type<scalar_t>;
    const auto backward = [exact](scalar_t gradient, scalar_t value) {
      const acc g = gradient, x = value;
      if (exact) {
        const acc cdf = acc(0.5) * (1 + std::erf(x * acc(kSqrtHalf)));
        return scalar_t(g * (cdf + x * acc(kDensityAtZero) * std::exp(acc(-0.5) * x * x)));
      }
      const acc t = std::tanh(acc(kSqrt2OverPi) * (x + acc(kCubic) * x * x * x));
      const acc inner = acc(kSqrt2OverPi) * (1 + 3 * acc(kCubic) * x * x);
      return scalar_t(g * (acc(0.5) * (1 + t) + acc(0.5) * x * (1 - t * t) * inner));
    };
    launch<scalar_t>("aten::gelu_backward.grad_input", out, backward, grad, self);
  });
  return out;
}

// Rows of the last dimension, one after the other in memory.
bool rows(const Tensor& self, int64_t dim, const Tensor& out) {
  return self.dim() > 0 && c10::maybe_wrap_dim(dim, self.dim()) == self.dim() - 1 && self.is_contiguous() &&
      out.is_contiguous() && out.sizes() == self.sizes() && out.scalar_type() == self.scalar_type() &&
      is_float(self.scalar_type()) && self.device() == out.device() && self.numel() != 0;
}

template <bool Log>
Tensor& softmax_rows(const char* name, const Tensor& self, Tensor& out) {
  SIM_FLOATS(self.scalar_type(), "softmax", [&] {
    using acc = at::opmath_type<scalar_t>;
    const int64_t width = self.size(-1), height = self.numel() / width;
    const c10::OptionalDeviceGuard guard(self.device());
    const Kernel kernel(name);
    const auto* from = self.const_data_ptr<scalar_t>();
    auto* to = out.mutable_data_ptr<scalar_t>();
    for (int64_t row = 0; row < height; row++, from += width, to += width) {
      acc largest = -std::numeric_limits<acc>::infinity();
      for (int64_t i = 0; i < width; i++) {
        const acc x = from[i];
        largest = std::isnan(x) || x > largest ? x : largest;
      }
      acc sum = 0;
      for (int64_t i = 0; i < width; i++) {
        sum += std::exp(acc(from[i]) - largest);
      }
      const acc shift = Log ? largest + std::log(sum) : largest;
      for (int64_t i = 0; i < width; i++) {
        const acc x = acc(from[i]) - shift;
        to[i] = scalar_t(Log ? x : std::exp(x) / sum);
      }
    }
  });
  return out;
}

Tensor& softmax_out(const Tensor& self, int64_t dim, bool half_to_float, Tensor& out) {
  return !half_to_float && rows(self, dim, out) ? softmax_rows<false>("aten::_softmax.out", self, out)
                                                : SIM_LIBRARY(_softmax, out)(self, dim, half_to_float, out);
}
Tensor& log_softmax_out(const Tensor& self, int64_t dim, bool half_to_float, Tensor& out) {
  return !half_to_float && rows(self, dim, out) ? softmax_rows<true>("aten::_log_softmax.out", self, out)
                                                : SIM_LIBRARY(_log_softmax, out)(self, dim, half_to_float, out);
}

std::tuple<Tensor, Tensor, Tensor> native_layer_norm(
    const Tensor& input, c10::SymIntArrayRef symbolic, const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias, double eps) {
  const auto shape = C10_AS_INTARRAYREF_SLOW(symbolic);
  const auto type = input.scalar_type();
  const auto fits = [&](const std::optional<Tensor>& t) {
    return !t || !t->defined() ||
        (t->sizes() == shape && t->is_contiguous() && t->scalar_type() == type && t->device() == input.device());
  };
  const auto outer_dims = input.dim() - int64_t(shape.size());
  if (!(type == at::kFloat || type == at::kDouble) || shape.empty() || outer_dims < 0 ||
      input.sizes().slice(outer_dims) != shape || !fits(weight) || !fits(bias) || input.numel() == 0) {
    return at::native::call_fallback_fn_symint<&library, at::_ops::native_layer_norm>::call(
        input, symbolic, weight, bias, eps);
  }
  const c10::OptionalDeviceGuard guard(input.device());
  const auto x = input.contiguous();
  const auto width = c10::multiply_integers(shape), height = x.numel() / width;
  std::vector<int64_t> outer(input.sizes().begin(), input.sizes().begin() + outer_dims);
  outer.resize(input.dim(), 1);
  auto out = at::empty(x.sizes(), x.options());
  auto mean = at::empty(outer, x.options());
  auto rstd = at::empty(outer, x.options());
  const Kernel kernel("aten::native_layer_norm");
  AT_DISPATCH_FLOATING_TYPES(type, "native_layer_norm", [&] {
    const auto* from = x.const_data_ptr<scalar_t>();
    const auto* w = weight && weight->defined() ? weight->const_data_ptr<scalar_t>() : nullptr;
    const auto* b = bias && bias->defined() ? bias->const_data_ptr<scalar_t>() : nullptr;
    auto* to = out.mutable_data_ptr<scalar_t>();
    for (int64_t row = 0; row < height; row++, from += width, to += width) {
      double sum = 0, squares = 0;
      for (int64_t i = 0; i < width; i++) {
        sum += from[i];
      }
      const double average = sum / width;
      for (int64_t i = 0; i < width; i++) {
        squares += (from[i] - average) * (from[i] - average);
      }
      const double scale = 1 / std::sqrt(squares / width + eps);
      for (int64_t i = 0; i < width; i++) {
        to[i] = scalar_t((from[i] - average) * scale * (w ? w[i] : 1) + (b ? b[i] : 0));
      }
      mean.mutable_data_ptr<scalar_t>()[row] = scalar_t(average);
      rstd.mutable_data_ptr<scalar_t>()[row] = scalar_t(scale);
    }
  });
  return {out, mean, rstd};
}

// Writes one element everywhere; its bytes are all that there is to know of it.
Tensor& fill_with(const char* name, Tensor& self, const Tensor& element) {
  if (self.numel() == 0) {
    return self;
  }
  auto iterator = at::TensorIteratorConfig()
                      .set_check_mem_overlap(false)
                      .check_all_same_dtype(false)
                      .resize_outputs(false)
                      .add_output(self)
                      .build();
  const size_t size = self.dtype().itemsize();
  const Kernel kernel(name);
  const auto host = (on_device(element) ? host_alias(element) : element).to(self.scalar_type());
  const auto* bytes = static_cast<const char*>(host.const_data_ptr());
  iterator.for_each([bytes, size](char** data, const int64_t* strides, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
      std::memcpy(data[0] + i * strides[0], bytes, size);
    }
  });
  return self;
}

Tensor& fill_scalar(Tensor& self, const Scalar& value) {
  return fill_with("aten::fill_.Scalar", self, at::scalar_tensor(value, at::TensorOptions().dtype(self.dtype())));
}
Tensor& fill_tensor(Tensor& self, const Tensor& value) {
  TORCH_CHECK(
      value.dim() == 0, "fill_ only supports 0-dimension value tensor but got tensor with ", value.dim(),
      " dimensions.");
  TORCH_CHECK(
      !on_device(value) || value.device() == self.device(), "Expected all tensors to be on the same device, but found ",
      self.device(), " and ", value.device());
  return fill_with("aten::fill_.Tensor", self, value);
}
Tensor& zero_(Tensor& self) {
  return fill_with("aten::zero_", self, at::scalar_tensor(0, at::TensorOptions().dtype(self.dtype())));
}

// Integers are counted too, which the host's kernel refuses: models that route tokens to experts count them by `histc`
// wherever they are not on the CPU.
Tensor counted(const Tensor& self, int64_t bins, const Scalar& min, const Scalar& max) {
  const auto library = at::native::call_fallback_fn<&sim::library, at::_ops::histc>::call;
  if (!c10::isIntegralType(self.scalar_type(), false)) {
    return library(self, bins, min, max);
  }
  return library(self.to(at::kDouble), bins, min, max).to(self.scalar_type());
}
Tensor& counted_out(const Tensor& self, int64_t bins, const Scalar& min, const Scalar& max, Tensor& out) {
  TORCH_CHECK(
      out.scalar_type() == self.scalar_type(), "torch.histogram: input tensor and hist tensor should have the same dtype",
      ", but got input ", self.scalar_type(), " and hist ", out.scalar_type());
  const auto counts = counted(self, bins, min, max);
  at::native::resize_output(out, counts.sizes());
  out.copy_(counts);
  return out;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("add.out", add_out);
  m.impl("sub.out", sub_out);
  m.impl("mul.out", mul_out);
  m.impl("div.out", div_out);
  m.impl("relu", relu);
  m.impl("relu_", relu_);
  m.impl("threshold_backward.grad_input", threshold_backward_out);
  m.impl("gelu.out", gelu_out);
  m.impl("gelu_backward.grad_input", gelu_backward_out);
  m.impl("_softmax.out", softmax_out);
  m.impl("_log_softmax.out", log_softmax_out);
  m.impl("native_layer_norm", native_layer_norm);
  m.impl("fill_.Scalar", fill_scalar);
  m.impl("fill_.Tensor", fill_tensor);
  m.impl("zero_", zero_);
  m.impl("histc", counted);
  m.impl("histc.out", counted_out);
}

} // namespace
} // namespace sim
