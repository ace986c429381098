"""What the pass `legalise` reads from nodes: dtypes, tensors and storages of their fake values."""

from typing import Any, Final

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from omnicomp._torch.dtypes import storage_key, was_written
from omnicomp.analysis.nodes import fake_value
from omnicomp.passes.attention.nodes import kind

CAST: Final = torch.ops.aten.to.dtype  # an OpOverload: differentiable, and known to AOTAutograd's cache as safe
MARK: Final = "legal_as_it_is"
"""Key of the metadata of nodes that have a dtype which the device lacks, and must: a second run leaves them alone."""


def leaves(node: Node) -> list[torch.Tensor]:
    """The fake tensors of a node's value."""
    return [leaf for leaf in tree_leaves(fake_value(node)) if isinstance(leaf, torch.Tensor)]


def is_tensor(node: Any) -> bool:
    """Whether a node's value is one tensor."""
    return isinstance(fake_value(node), torch.Tensor)


def dtypes(node: Any) -> Any:
    """The dtype of a tensor node; of a tuple, those of its tensors; of others None."""
    fake = fake_value(node) if isinstance(node, Node) else None
    if isinstance(fake, torch.Tensor):
        return fake.dtype
    found = tuple(leaf.dtype for leaf in tree_leaves(fake) if isinstance(leaf, torch.Tensor))
    return found or None


def literals(node: Node) -> list[Any]:
    """The arguments of a node, nodes among them."""
    return tree_leaves((node.args, dict(node.kwargs)))


def storages(node: Node) -> set[int]:
    """The identities of the storages of a node's tensors."""
    return {key for key in map(storage_key, leaves(node)) if key is not None}


def written_storages(node: Node) -> set[int]:
    """Those of them that the graph writes to, as far as this node shows."""
    return storages(node) if any(map(was_written, leaves(node))) else set()


MOVES: Final = frozenset(
    "view reshape transpose permute t T mT swapaxes swapdims movedim moveaxis expand expand_as unsqueeze squeeze "
    "flatten unflatten contiguous clone detach narrow select chunk split split_with_sizes tensor_split unbind unfold "
    "view_as reshape_as as_strided diagonal index_select alias ravel repeat tile flip roll broadcast_to "
    "t_ transpose_ squeeze_ unsqueeze_ detach_ requires_grad_ size dim stride numel is_contiguous zero_".split()
)
"""Operators that copy or view one tensor: they take a dtype that is only stored."""

CASTS: Final[dict[str, torch.dtype | None]] = {
    "to": None,
    "type": None,
    "type_as": None,
    "_to_copy": None,
    "double": torch.float64,
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "char": torch.int8,
    "byte": torch.uint8,
    "cfloat": torch.complex64,
    "cdouble": torch.complex128,
}
"""Conversions, with the dtype of those that are named after it."""

FILLS: Final = frozenset(
    "empty zeros ones full tensor empty_like zeros_like ones_like full_like new_empty new_zeros new_ones new_full "
    "new_tensor empty_strided as_tensor scalar_tensor".split()
)
"""Factories that write one value, or given ones: they take a dtype that is only stored."""

TAKES_DTYPE: Final = FILLS | frozenset(
    "arange linspace logspace eye rand randn randint randperm rand_like randn_like randint_like tril_indices "
    "triu_indices sum nansum prod cumsum cumprod hann_window hamming_window".split()
)
"""Operators whose result has a dtype that `dtype=` overrules, and which may be one that no operand has."""

WANTS_INT64: Final = frozenset(
    "take put put_ take_along_dim cross_entropy nll_loss index_copy index_copy_ index_fill index_fill_ gather "
    "scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ ctc_loss multi_margin_loss "
    "linear_cross_entropy max_unpool1d max_unpool2d max_unpool3d max_pool2d_with_indices_backward".split()
)
"""Operators that refuse indices in another dtype than int64, in some release of torch."""

STATISTICS: Final[dict[str, tuple[int, int]]] = {"batch_norm": (1, 2), "instance_norm": (1, 2)}
"""Operators that write to arguments without saying so in their name: running statistics."""

MAKES_INT64: Final = frozenset("nonzero argwhere bincount".split())
"""Operators whose result has a size that depends on data, and is of int64 whatever they read."""

_OPERATORS: Final = frozenset(
    "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul setitem".split()
)


def moves(node: Node) -> bool:
    """Whether an operator copies or views one tensor; the unfold of images, im2col, has kernels by dtype."""
    return kind(node) in MOVES and node.target is not torch.nn.functional.unfold


def gathers(node: Node) -> bool:
    """Whether rows are taken by an index that is a tensor, which may name one more than once: the gradient is a sum."""
    return kind(node) == "index_select" or (kind(node) == "getitem" and any(map(is_tensor, node.all_input_nodes[1:])))


def writes_to(node: Node) -> Node | None:
    """The tensor that an operator changes in place, or writes its result to; None for others."""
    out: Any = node.kwargs.get("out")
    if isinstance(out, Node):
        return out
    name = kind(node)
    # Python calls its own `&` and `|` and_ and or_.
    named = name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_", "is_")
    in_place = name in _OPERATORS or named
    if not (in_place or node.kwargs.get("inplace") is True):
        return None
    target: Any = node.args[0] if node.args else node.kwargs.get("input")
    return target if isinstance(target, Node) else None
