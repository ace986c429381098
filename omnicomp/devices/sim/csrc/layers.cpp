// Operators that torch asks of each device separately: convolutions and the cells of recurrent layers.
#include "alias.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

Tensor defined(const MaybeTensor& tensor) {
  return tensor ? *tensor : Tensor();
}

// Results are contiguous, whatever the layout of the input: that is what torch predicts for a device from outside.
Tensor convolution(
    const Tensor& input, const Tensor& weight, const MaybeTensor& bias, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  const auto device = one_device("aten::convolution", {input, weight, defined(bias)});
  const c10::DeviceGuard guard(device);
  const Kernel kernel("aten::convolution_overrideable");
  return to_device(
      at::convolution(
          host_alias(input), host_alias(weight), host_alias(defined(bias)), stride, padding, dilation, transposed,
          output_padding, groups),
      device, true);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  const auto device = one_device("aten::convolution_backward", {grad, input, weight});
  const c10::DeviceGuard guard(device);
  const Kernel kernel("aten::convolution_backward_overrideable");
  const std::array<int64_t, 1> channels{grad.size(1)};
  const auto [x, w, b] = at::convolution_backward(
      host_alias(grad), host_alias(input), host_alias(weight), at::OptionalIntArrayRef(channels), stride, padding,
      dilation, transposed, output_padding, groups, mask);
  return {to_device(x, device, true), to_device(w, device, true), to_device(b, device, true)};
}

Tensor gates_of(const Tensor& gates, const MaybeTensor& bias) {
  auto result = host_alias(gates);
  return bias && bias->defined() ? result + host_alias(*bias) : result;
}

// Gates i, f, g, o in this order along dimension 1. The workspace keeps them after their activations.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const MaybeTensor& input_bias,
    const MaybeTensor& hidden_bias) {
  const auto device = one_device(
      "aten::_thnn_fused_lstm_cell",
      {input_gates, hidden_gates, cx, defined(input_bias), defined(hidden_bias)});
  const c10::DeviceGuard guard(device);
  const Kernel kernel("aten::_thnn_fused_lstm_cell");
  const auto gates = (gates_of(input_gates, input_bias) + gates_of(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  const auto cy = f * host_alias(cx) + i * g;
  return {
      to_device(o * cy.tanh(), device), to_device(cy, device), to_device(at::cat({i, f, g, o}, 1), device)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const MaybeTensor& grad_hy, const MaybeTensor& grad_cy, const Tensor& cx, const Tensor& cy,
    const Tensor& workspace, bool has_bias) {
  if (!defined(grad_hy).defined() && !defined(grad_cy).defined()) {
    return {Tensor(), Tensor(), Tensor()};
  }
  const auto device = one_device(
      "aten::_thnn_fused_lstm_cell_backward_impl", {cx, cy, workspace, defined(grad_hy), defined(grad_cy)});
  const c10::DeviceGuard guard(device);
  const Kernel kernel("aten::_thnn_fused_lstm_cell_backward_impl");
  const auto gates = host_alias(workspace).chunk(4, 1);
  const auto &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  const auto tanh_cy = host_alias(cy).tanh();
  const auto zero = at::zeros_like(tanh_cy);
  const auto dhy = defined(grad_hy).defined() ? host_alias(*grad_hy) : zero;
  const auto dcy =
      dhy * o * (1 - tanh_cy * tanh_cy) + (defined(grad_cy).defined() ? host_alias(*grad_cy) : zero);
  const auto grads = at::cat(
      {dcy * g * i * (1 - i), dcy * host_alias(cx) * f * (1 - f), dcy * i * (1 - g * g), dhy * tanh_cy * o * (1 - o)},
      1);
  return {
      to_device(grads, device), to_device(dcy * f, device),
      has_bias ? to_device(grads.sum(0, false), device) : Tensor()};
}

// Gates r, z, n in this order along dimension 1. The workspace keeps r, z, n, hx and the hidden part of n.
std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const MaybeTensor& input_bias,
    const MaybeTensor& hidden_bias) {
  const auto device = one_device(
      "aten::_thnn_fused_gru_cell", {input_gates, hidden_gates, hx, defined(input_bias), defined(hidden_bias)});
  const c10::DeviceGuard guard(device);
  const Kernel kernel("aten::_thnn_fused_gru_cell");
  const auto in = gates_of(input_gates, input_bias).chunk(3, 1);
  const auto hidden = gates_of(hidden_gates, hidden_bias).chunk(3, 1);
  const auto r = (in[0] + hidden[0]).sigmoid(), z = (in[1] + hidden[1]).sigmoid();
  const auto n = (in[2] + r * hidden[2]).tanh();
  const auto before = host_alias(hx);
  return {
      to_device(n + z * (before - n), device), to_device(at::cat({r, z, n, before, hidden[2]}, 1), device)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  const auto device = one_device("aten::_thnn_fused_gru_cell_backward", {grad_hy, workspace});
  const c10::DeviceGuard guard(device);
  const Kernel kernel("aten::_thnn_fused_gru_cell_backward");
  const auto kept = host_alias(workspace).chunk(5, 1);
  const auto &r = kept[0], &z = kept[1], &n = kept[2], &hx = kept[3], &hidden_n = kept[4];
  const auto dhy = host_alias(grad_hy);
  const auto dz = dhy * (hx - n) * z * (1 - z);
  const auto dn = dhy * (1 - z) * (1 - n * n);
  const auto dr = dn * hidden_n * r * (1 - r);
  const auto grad_input = at::cat({dr, dz, dn}, 1), grad_hidden = at::cat({dr, dz, dn * r}, 1);
  return {
      to_device(grad_input, device), to_device(grad_hidden, device), to_device(dhy * z, device),
      has_bias ? to_device(grad_input.sum(0, false), device) : Tensor(),
      has_bias ? to_device(grad_hidden.sum(0, false), device) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

} // namespace
} // namespace sim
