"""How large the integers of a graph can be, as far as sizes and constants prove it."""

import math
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from omnicomp._torch.symbols import free_unbacked_symbols
from omnicomp.analysis.nodes import fake_value
from omnicomp.passes.attention.nodes import kind
from omnicomp.passes.legal.dtypes import INTEGERS, largest
from omnicomp.passes.legal.operators import CASTS, MOVES

__all__ = ["Ranges", "beyond", "constant"]

_INDICES: Final = frozenset(
    "argmax argmin argsort sort topk max min kthvalue mode median nonzero argwhere cummax cummin "
    "searchsorted bucketize max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices count_nonzero "
    "multinomial randperm tril_indices triu_indices bincount unique".split()
)
_SAME: Final = frozenset(
    "getitem where minimum maximum cat concat stack masked_fill neg abs clamp_max relu gather take take_along_dim "
    "index_select contiguous unique amax amin max min sort topk cummax cummin tril triu scatter".split()
)
_LIKE: Final = frozenset(
    "zeros ones empty zeros_like ones_like empty_like new_zeros new_ones new_empty one_hot".split()
)
_UNKNOWN_IN_ORDER: Final = frozenset("add sub radd rsub mul iadd isub imul".split())


class Ranges:
    """Bounds on the magnitude of integer values, node by node; a node is asked for after the nodes that it reads."""

    def __init__(self) -> None:
        self._known: dict[Node, float | None] = {}

    def of(self, node: Any) -> float | None:
        """The largest magnitude that an integer value of the graph can have; None if nothing is proved."""
        if isinstance(node, bool):
            return 1
        if isinstance(node, int):
            return abs(node)
        if not isinstance(node, Node):
            return None
        if node not in self._known:
            self._known[node] = self._find(node)
        return self._known[node]

    def set(self, node: Node, bound: float | None) -> None:
        """Record what is known of a node by other means, as of one that is checked at run time."""
        self._known[node] = bound

    def forget(self, node: Node) -> None:
        """Nothing is known of a value any more, as it was written to."""
        self._known[node] = None

    def fits(self, node: Node, limit: float) -> bool:
        """Whether all of a value's magnitudes are proved to be within `limit`.

        Sizes that are backed symbols are compared, which guards on them: a graph for larger ones is compiled apart.
        """
        bound = self.of(node)
        if bound is None or _is_unbacked(bound):
            return False
        return bool(bound <= limit)

    def _find(self, node: Node) -> float | None:
        fake = fake_value(node)
        own = [leaf for leaf in tree_leaves(fake) if isinstance(leaf, torch.Tensor)]
        if isinstance(fake, int | torch.SymInt) and not own:
            size: Any = fake  # a symbolic one is compared like a number
            return abs(size) if isinstance(fake, int) else size
        if own and all(v.dtype is torch.bool for v in own):
            return 1
        small = [v.dtype for v in own]
        narrow = max(map(largest, small)) if small and all(d in INTEGERS and d.itemsize < 4 for d in small) else None
        found = self._of_call(node, fake)
        return narrow if found is None else found

    def _of_call(self, node: Node, fake: Any) -> float | None:
        value = constant(node)
        if value is not None:
            return value
        name = kind(node)
        args: list[Any] = list(node.args)
        operand: Any = args[0] if args else node.kwargs.get("input")
        before = fake_value(operand)
        if name == "getitem" and kind(operand) in _INDICES and not isinstance(before, torch.Tensor):
            # The values come first, the indices second.
            return self.of(operand.args[0]) if args[1] == 0 else _numel(fake_value(operand.args[0]))
        if name in _INDICES and not (name in ("max", "min") and len(args) > 1 and isinstance(args[1], Node)):
            integers = isinstance(before, torch.Tensor) and before.dtype in INTEGERS
            if isinstance(fake, torch.Tensor) and name in ("max", "min"):
                return self.of(operand) if integers else None
            if name in ("randperm", "tril_indices", "triu_indices"):
                return _most(self.of(a) for a in args)
            if name in ("searchsorted", "bucketize"):
                return _numel(fake_value(operand if name == "searchsorted" else args[1]))
            return None if name in ("bincount", "unique") else _numel(before)
        if name == "arange":
            return _most(self.of(a) for a in args)
        if name in ("full", "full_like", "new_full"):
            return self.of(args[-1]) if len(args) > 1 else self.of(node.kwargs.get("fill_value"))
        if name in _LIKE:
            return 1
        if name in ("randint", "randint_like"):
            return _most(self.of(a) for a in args if isinstance(a, int | Node) and not isinstance(a, bool))
        return self._of_arithmetic(node, name, args, before)

    def _of_arithmetic(self, node: Node, name: str, args: list[Any], before: Any) -> float | None:
        operand = args[0] if args else None
        if name in CASTS or name in MOVES or name in _SAME:
            if isinstance(before, torch.Tensor) and before.is_floating_point():
                return None
            values = [a for a in tree_leaves(args if name in _SAME and name != "getitem" else args[:1]) if _is_value(a)]
            return _most(map(self.of, values))
        if name in ("add", "sub", "iadd", "isub", "rsub", "radd") and len(args) == 2 and not node.kwargs:
            return _joined(map(self.of, args), lambda a, b: a + b)
        if name in ("mul", "imul", "rmul") and len(args) == 2:
            return _joined(map(self.of, args), lambda a, b: a * b)
        if name in ("floordiv", "ifloordiv", "floor_divide", "bitwise_right_shift", "rshift"):
            return self.of(operand)
        if name in ("remainder", "mod", "fmod") and len(args) == 2:
            return self.of(args[1])
        if name in ("clamp", "clip"):
            ends = [self.of(v) for v in (*args[1:3], *node.kwargs.values()) if v is not None]
            return _most(ends) if len(ends) == 2 else None
        if name in ("sum", "cumsum", "nansum", "count_nonzero"):
            return _joined((self.of(operand), _numel(before)), lambda a, b: a * b)
        return None


def constant(node: Node) -> float | None:
    """The largest magnitude in a tensor that the graph holds, or was written with; None for other nodes."""
    leaves: list[Any] = []
    if node.op == "get_attr" and node.graph.owning_module is not None:
        value: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            value = getattr(value, part, None)
        plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and value.device.type != "meta"
        if not plain or value.numel() == 0 or value.is_complex():
            return None
        return beyond(value.detach().tolist())
    if kind(node) in ("tensor", "as_tensor", "scalar_tensor", "full") and node.op == "call_function":
        leaves = tree_leaves(node.args[-1] if kind(node) == "full" else node.args[0])
    numbers = all(isinstance(leaf, int | float) for leaf in leaves)
    return beyond(leaves) if leaves and numbers else None


def beyond(values: Any) -> float:
    """The largest finite magnitude among Python numbers."""
    leaves = [abs(v) for v in tree_leaves(values) if isinstance(v, int | float) and math.isfinite(v)]
    return max(leaves, default=0)


def _is_value(value: Any) -> bool:
    return isinstance(value, int | Node)


def _most(bounds: Iterable[float | None]) -> float | None:
    found = list(bounds)
    return max(found) if found and all(v is not None and not _is_unbacked(v) for v in found) else None  # type: ignore[type-var]


def _joined(bounds: Iterable[float | None], join: Any) -> float | None:
    a, b = bounds
    return None if a is None or b is None else join(a, b)


def _numel(value: Any) -> Any:
    return value.numel() if isinstance(value, torch.Tensor) else None


def _is_unbacked(value: Any) -> bool:
    return isinstance(value, torch.SymInt) and bool(free_unbacked_symbols(value))
