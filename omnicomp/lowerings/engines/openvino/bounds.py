"""Whether integers stay where OpenVINO's CPU plugin computes them exactly: it compares and sums them in float32.

What comes into a subgraph is asked at each call to be below a limit. From there on the largest value that an operator
can make of its operands is followed; where that is not known, or too large, the operator is not taken.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from omnicomp._torch.symbols import known_range
from omnicomp.analysis.nodes import fake_value
from omnicomp.lowerings.engines.checks import argument

__all__ = ["INTEGERS", "LIMIT", "exceeds", "overflow"]

INTEGERS: Final = (torch.int64, torch.int32)

LIMIT: Final = 2**21
_MOST: Final = 2**24
_KEY: Final = "omnicomp_openvino_bound"

# What makes no larger numbers of its operands than they are.
_SAME: Final = frozenset(
    "view _unsafe_view reshape permute transpose t expand squeeze unsqueeze slice select cat stack split"
    " split_with_sizes unbind flip roll repeat clone alias detach lift_fresh_copy gather index index_select"
    " where maximum minimum amax amin clamp clamp_min clamp_max abs neg sign masked_fill tril triu"
    " constant_pad_nd scatter as_strided relu remainder fmod full full_like fill scalar_tensor"
    " new_full floor_divide bitwise_not diagonal getitem slice_scatter select_scatter embedding".split()
)
# Beside those of its operands, positions in them.
_SMALL: Final = frozenset(
    "argmax argmin zeros ones zeros_like ones_like new_zeros new_ones arange max min sort topk"
    " max_pool2d_with_indices max_pool3d_with_indices".split()
)
_SUMS: Final = frozenset("sum cumsum".split())


def exceeds(values: torch.Tensor) -> bool:
    """Whether an element of a tensor on the CPU is beyond the limit."""
    if not values.numel():
        return False
    least, most = torch.aminmax(values)
    return int(most) > LIMIT or int(least) < -LIMIT


def overflow(node: Node) -> str:
    """Why a node's integers may not be exact: one sentence; empty if they are, or if there are none."""
    if not any(_is_wide(leaf) for leaf in tree_leaves(fake_value(node))):
        return ""
    bound = _bound(node)
    if bound <= _MOST:
        return ""
    return "its integers may leave what float32 holds exactly, in which OpenVINO computes some of them"


def _is_wide(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in INTEGERS


def _bound(node: Node) -> float:
    found = node.meta.get(_KEY)
    if found is None:
        found = node.meta[_KEY] = _computed(node)
    return found


def _computed(node: Node) -> float:
    if node.op != "call_function":
        return LIMIT
    schema = getattr(node.target, "_schema", None)
    name = schema.name.partition("::")[2] if schema is not None else getattr(node.target, "__name__", "")
    operands = [_of(arg) for arg in tree_leaves((node.args, node.kwargs))]
    largest = max(operands, default=0)
    if name in _SAME:
        return largest
    if name in _SMALL:
        return max(largest, 1, *(_elements(arg) for arg in node.all_input_nodes))
    if name in _SUMS:
        return largest * _elements(node.all_input_nodes[0], argument(node, "dim"))
    if name == "_to_copy":
        return _converted(node)
    combined: Callable[..., float] | None = {"add": _sum, "sub": _sum, "rsub": _sum, "mul": _product}.get(name)
    return combined(node) if combined is not None else math.inf


def _of(value: Any) -> float:
    if isinstance(value, bool):
        return 1
    if isinstance(value, (int, float)):
        return abs(value)
    if isinstance(value, Node):
        fake = fake_value(value)
        if isinstance(fake, torch.SymInt):
            return _most(fake)
        if isinstance(fake, (int, float)):
            return abs(fake)
        dtypes = {leaf.dtype for leaf in tree_leaves(fake) if isinstance(leaf, torch.Tensor)}
        if dtypes <= {torch.bool}:
            return 1
        return _bound(value) if dtypes & {torch.int64, torch.int32} else 0
    return 0


def _most(size: Any) -> float:
    """The largest value of a symbolic size; the program would not fit into memory beyond the limit."""
    _, high = known_range(size, size.node.expr)
    return LIMIT if high is None else min(high, LIMIT)


def _elements(node: Node, dim: Any = None) -> float:
    """How many elements a tensor has, or those of its dimensions that are summed; none given stands for all."""
    fake = fake_value(node)
    if not isinstance(fake, torch.Tensor):
        return LIMIT
    dims = [dim] if isinstance(dim, int) else list(dim or range(fake.ndim))
    sizes = [fake.shape[each] for each in dims] if fake.ndim else []
    return math.prod(size if type(size) is int else _most(size) for size in sizes)


def _sum(node: Node) -> float:
    scale = node.kwargs.get("alpha", 1)
    return _of(node.args[0]) + _of(node.args[1]) * (abs(scale) if isinstance(scale, (int, float)) else math.inf)


def _product(node: Node) -> float:
    return _of(node.args[0]) * _of(node.args[1])


def _converted(node: Node) -> float:
    source = node.args[0]
    fake = fake_value(source) if isinstance(source, Node) else None
    if isinstance(fake, torch.Tensor) and not fake.dtype.is_floating_point:
        return _of(source)
    return math.inf
