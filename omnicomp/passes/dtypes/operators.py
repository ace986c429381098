"""Classes of operators: which are matrix work, which need a wide dtype, which only move data; all by torch's names.

The classes follow what rounding does to them. Matrix work sums products in a wide accumulator whatever its operands
are, so that narrow operands cost one rounding each. Sums, exponentials and what is made of them add up many roundings,
or amplify them.
"""

from typing import Any, Final

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from omnicomp.analysis.nodes import fake_value, op_name

ATTENTION: Final = "scaled_dot_product_attention"
_PRODUCTS: Final = frozenset("linear matmul mm bmm mv addmm addmv addbmm baddbmm einsum bilinear tensordot".split())
_CONVOLUTIONS: Final = frozenset(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))
# Matrix work and much else in one call.
BUNDLES: Final = frozenset(
    "multi_head_attention_forward _native_multi_head_attention _transformer_encoder_layer_fwd bilinear lstm gru "
    "lstm_cell gru_cell rnn_tanh rnn_relu rnn_tanh_cell rnn_relu_cell".split()
)

# Views of every element, or of more: worth doing after a cast rather than before it, so that the cast is shared and
# an expanded tensor is cast before it is expanded.
VIEWS: Final = frozenset(
    "view reshape transpose permute t T mT swapaxes swapdims movedim expand unsqueeze squeeze flatten unflatten".split()
)
# What else gives the same bits before a cast as after it. Rounding pointwise functions (gelu, add, mul) are not here:
# in half precision each would round once more, and the residual stream goes through them.
EXACT: Final = VIEWS | frozenset(
    "getitem chunk split split_with_sizes unbind narrow select contiguous clone detach repeat relu neg dropout".split()
)
# What rounds nothing; relu, neg and dropout are arithmetic that a rule may name.
_MOVES: Final = (EXACT - frozenset(("relu", "neg", "dropout"))) | frozenset(
    "view_as reshape_as expand_as diagonal unfold as_strided index_select gather take take_along_dim tile roll flip "
    "embedding stack cat concat concatenate hstack vstack pad masked_select where masked_fill setitem copy_ zeros_like "
    "ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full bernoulli multinomial "
    "to float half bfloat16 double type type_as cpu cuda numpy item tolist".split()
)

# What torch has no kernel for in half precision on any device, by the dtypes that torch's own tests try (`op_db`).
FLOAT32_AT_LEAST: Final = frozenset(
    "cdist pdist ctc_loss quantile nanquantile histogram histogramdd stft svd_lowrank pca_lowrank pinverse logdet "
    "cholesky cholesky_ex cholesky_inverse cholesky_solve cond det slogdet eig eigh eigvals eigvalsh geqrf ormqr "
    "householder_product inv inverse inv_ex ldl_factor ldl_factor_ex ldl_solve lstsq lu lu_factor lu_factor_ex "
    "lu_solve lu_unpack matrix_power matrix_rank pinv qr solve solve_ex solve_triangular triangular_solve svd svdvals "
    "tensorinv tensorsolve vander airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 "
    "modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 "
    "spherical_bessel_j0 erfcx log_ndtr ndtri zeta".split()
)

CLASSES: Final[dict[str, frozenset[str]]] = {
    "matrix": _PRODUCTS | _CONVOLUTIONS | BUNDLES | {ATTENTION},
    "softmax": frozenset("softmax log_softmax softmin gumbel_softmax logsumexp logcumsumexp".split()),
    "norm": frozenset(
        "layer_norm rms_norm group_norm batch_norm instance_norm local_response_norm normalize norm vector_norm "
        "matrix_norm renorm cosine_similarity pairwise_distance cdist pdist dist".split()
    ),
    "loss": frozenset(
        "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy "
        "binary_cross_entropy_with_logits poisson_nll_loss gaussian_nll_loss hinge_embedding_loss margin_ranking_loss "
        "multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss soft_margin_loss triplet_margin_loss "
        "cosine_embedding_loss ctc_loss".split()
    ),
    "reduction": frozenset("sum mean prod var std var_mean std_mean nansum nanmean trace".split()),
    "exp": frozenset(
        "exp exp2 expm1 log log2 log10 log1p logit pow rsqrt reciprocal erfinv sinh cosh tan acos asin softplus "
        "float_power logaddexp logaddexp2".split()
    ),
    "cumulative": frozenset("cumsum cumprod".split()),
    "move": _MOVES,
}
_WIDE: Final = ("softmax", "norm", "loss", "reduction", "exp", "cumulative")
_CLASS_OF: Final = {name: cls for cls, names in CLASSES.items() for name in names}

# Modules of the targets that the names above mean; `op_name` writes torch._C._nn as torch.nn.functional.
_MODULES: Final = frozenset(
    " torch torch.functional torch.nn.functional torch.linalg torch.special torch._C._linalg torch._C._special "
    "Tensor operator builtins math".split(" ")
)
# Operators that attention fusion puts in, with the arguments of the one that they stand for.
_OWN: Final = {"pinned_attention": ATTENTION}
_PREFIXES: Final = ("linalg_", "special_")
_CASTS: Final = frozenset("to float half bfloat16 double type type_as".split())


def kind(node: Node) -> str:
    """The bare name of a torch function or method, for example `matmul` for `a @ b`; empty for others."""
    if node.op not in ("call_function", "call_method"):
        return ""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name if namespace == "aten" else _OWN.get(name, "") if namespace == "omnicomp" else ""
    module, _, name = op_name(node).rpartition(".")
    if module not in _MODULES:
        return ""
    if name == "getattr":
        return str(node.args[1])
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def operator_class(node: Node) -> tuple[str, ...]:
    """The classes of an operator, narrowest first: `("softmax", "wide")`; empty for what is no operator of torch.

    What is in no list is taken for pointwise arithmetic.
    """
    name = kind(node)
    if not name:
        return ()
    found = _CLASS_OF.get(name, "pointwise")
    return (found, "wide") if found in _WIDE else (found,)


def is_cast(node: Node) -> bool:
    """Whether the node changes a dtype, or may do so, and nothing else."""
    return kind(node) in _CASTS


def is_optimizer(node: Node) -> bool:
    """Whether the user's optimizer runs the node, as where its step is compiled."""
    trace = node.meta.get("stack_trace") or node.stack_trace or ""
    return "/torch/optim/" in trace.replace("\\", "/")


def source(node: Node, names: frozenset[str] = EXACT) -> Node | None:
    """The operand of an operator of `names` that reads one floating-point value and gives its dtype."""
    name = kind(node)
    if name not in names or not node.args or not isinstance(node.args[0], Node):
        return None
    others = tree_leaves((node.args[1:], dict(node.kwargs)))
    if any(isinstance(v, torch.dtype) or isinstance(fake_value(v), torch.Tensor) for v in others):
        return None  # view(dtype), or an index that is data
    if name == "dropout" and False not in (*node.args[2:3], *map(node.kwargs.get, ("training", "train"))):
        return None
    values = [*tensors(node), *tensors(node.args[0])]
    alike = values and values[0].is_floating_point() and all(v.dtype is values[0].dtype for v in values)
    return node.args[0] if alike else None


def tensors(node: Node) -> list[torch.Tensor]:
    """The fake tensors of a node's value."""
    return [leaf for leaf in tree_leaves(fake_value(node)) if isinstance(leaf, torch.Tensor)]
