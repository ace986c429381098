"""The operators that XLA takes: those of which torch's decompositions to primitives leave none without a form.

They were compared with eager on the samples of PyTorch's operator database, forward and backward.
"""

from torch.fx import Node

from omnicomp._torch.autograd.decompose import decompositions_of
from omnicomp.lowerings.engines.checks import argument, no_dropout, no_masks
from omnicomp.lowerings.engines.xla.engine import XlaEngine

XlaEngine.decompositions = decompositions_of(("_fused_rms_norm_backward",))  # of CUDA alone
_take = XlaEngine.operators.take


def _not_by_frequency(node: Node) -> str:
    return "it does not scale gradients by frequency" if argument(node, "scale_grad_by_freq") else ""


_take(
    "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _fused_rms_norm _log_softmax"
    " _log_softmax_backward_data _native_batch_norm_legit_functional _native_batch_norm_legit_no_training"
    " _prelu_kernel _prelu_kernel_backward _safe_softmax _softmax _softmax_backward_data _to_copy _unsafe_view abs"
    " acos acosh add.Scalar add.Tensor addcdiv addcmul addmm addmv addr alias all all.dim all.dims amax amin aminmax"
    " any any.dim any.dims arange arange.start arange.start_step argmax argmin argsort asin asinh atan atan2 atanh"
    " avg_pool2d avg_pool2d_backward baddbmm binary_cross_entropy binary_cross_entropy_backward"
    " binary_cross_entropy_with_logits bitwise_and.Scalar bitwise_and.Scalar_Tensor bitwise_and.Tensor"
    " bitwise_left_shift.Scalar_Tensor bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_not"
    " bitwise_or.Scalar bitwise_or.Scalar_Tensor bitwise_or.Tensor bitwise_right_shift.Scalar_Tensor"
    " bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar bitwise_xor.Scalar bitwise_xor.Scalar_Tensor"
    " bitwise_xor.Tensor bmm cat ceil celu clamp clamp.Tensor clamp_max clamp_max.Tensor clamp_min clamp_min.Tensor"
    " clone constant_pad_nd convolution convolution_backward copysign.Scalar copysign.Tensor cos cosh count_nonzero"
    " count_nonzero.dim_IntList cumprod cumsum deg2rad detach diag_embed diagonal diagonal_backward digamma div.Scalar"
    " div.Scalar_mode div.Tensor div.Tensor_mode dot elu elu_backward embedding eq.Scalar eq.Tensor erf erfc erfinv"
    " exp exp2 expand expm1 eye eye.m flip floor floor_divide floor_divide.Scalar fmax fmin fmod.Scalar fmod.Tensor"
    " frac full full_like gather ge.Scalar ge.Tensor gelu gelu_backward glu glu_backward gt.Scalar gt.Tensor"
    " hardshrink hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward heaviside"
    " huber_loss huber_loss_backward hypot im2col index_add index_copy index_select isinf isnan le.Scalar le.Tensor"
    " leaky_relu leaky_relu_backward lerp.Scalar lerp.Tensor lgamma lift_fresh_copy linalg_vector_norm log log10 log1p"
    " log2 log_sigmoid_backward log_sigmoid_forward logaddexp logaddexp2 logical_and logical_not logical_or"
    " logical_xor logit logit_backward logsumexp lt.Scalar lt.Tensor masked_fill.Scalar masked_fill.Tensor max max.dim"
    " max.other max_pool2d_with_indices max_pool2d_with_indices_backward maximum mean mean.dim min min.dim min.other"
    " minimum mish mish_backward mm mse_loss mse_loss_backward mul.Scalar mul.Tensor mv nan_to_num"
    " native_batch_norm_backward native_group_norm native_group_norm_backward native_layer_norm"
    " native_layer_norm_backward ne.Scalar ne.Tensor neg new_full new_ones new_zeros nll_loss2d_backward"
    " nll_loss2d_forward nll_loss_backward nll_loss_forward ones ones_like permute pixel_shuffle pixel_unshuffle"
    " pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prod prod.dim_int rad2deg reciprocal reflection_pad1d"
    " reflection_pad2d reflection_pad3d relu remainder.Scalar remainder.Scalar_Tensor remainder.Tensor repeat"
    " replication_pad1d replication_pad2d replication_pad3d reshape roll rot90 round rsqrt rsub.Scalar rsub.Tensor"
    " scalar_tensor scatter.src scatter.value scatter_add select.int select_backward select_scatter sgn sigmoid"
    " sigmoid_backward sign signbit silu silu_backward sin sinc sinh slice.Tensor slice_backward slice_scatter"
    " smooth_l1_loss smooth_l1_loss_backward softplus softplus_backward softshrink sort sort.stable split.Tensor"
    " split_with_sizes sqrt square squeeze squeeze.dim squeeze.dims stack std.correction std_mean.correction"
    " sub.Scalar sub.Tensor sum sum.dim_IntList t tan tanh tanh_backward threshold threshold_backward"
    " topk trace transpose.int tril tril_indices triu triu_indices trunc unbind.int unfold unsqueeze"
    " upsample_bilinear2d upsample_nearest1d upsample_nearest2d"
    " var.correction var_mean.correction view where.self xlogy.Scalar_Other xlogy.Scalar_Self"
    " xlogy.Tensor zeros zeros_like"
)
_take("index.Tensor _unsafe_index.Tensor index_put _unsafe_index_put", check=no_masks)
_take("embedding_dense_backward", check=_not_by_frequency)
_take(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward",
    devices=("cpu",),
    check=no_dropout,
)
