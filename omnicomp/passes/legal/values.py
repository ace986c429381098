"""Checks at run time that integers fit a narrower dtype, computed in floats that the device has."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from omnicomp._torch.symbols import free_unbacked_symbols
from omnicomp.analysis.nodes import fake_value, insert_call, op_name, source_line
from omnicomp.passes.attention.nodes import kind
from omnicomp.passes.legal.decisions import Decisions
from omnicomp.passes.legal.dtypes import INTEGERS, Legal, largest, loses_range, short
from omnicomp.passes.legal.fakes import (
    CAST,
    CASTS,
    MOVES,
    dtypes,
    leaves,
    literals,
    storages,
    writes_to,
    written_storages,
)

_CAST: Final = torch.ops.aten.to.dtype
_ARITHMETIC: Final[dict[str, Any]] = {
    "add": torch.add,
    "iadd": torch.add,
    "add_": torch.add,
    "sub": torch.sub,
    "isub": torch.sub,
    "sub_": torch.sub,
    "mul": torch.mul,
    "imul": torch.mul,
    "mul_": torch.mul,
}


def insert(value: Node, target: torch.dtype, user: Node, legal: Legal) -> bool:
    """Check before `user` that the integers of `value` fit `target`.

    The values are converted to the widest float that the device has. Rounding is monotonic, and `2**31` is a float of
    any precision: what rounds to less is less. A few integers below the limit round to it, and are refused.

    Returns:
        False if the device has no float to check in.
    """
    wide = _widest(legal)
    if wide is None:
        return False
    number = insert_call(user, _CAST, (value, wide))
    _assert(number, value, target, user)
    return True


def insert_arithmetic(node: Node, target: torch.dtype, legal: Legal, operand: Callable[[Node, Node], Node]) -> bool:
    """Check before `node`, a sum, difference or product of integers, that its result will fit `target`.

    The result is computed in floats. Of operands that fit, the error is at most three roundings of numbers up to the
    limit, which is lowered by more.

    Returns:
        False if there is no such check.
    """
    wide = _widest(legal)
    function = _ARITHMETIC.get(kind(node))
    if wide is None or function is None or len(node.args) != 2 or node.kwargs:
        return False
    args: list[Any] = []
    for value in node.args:
        if isinstance(value, Node) and isinstance(fake_value(value), torch.Tensor):
            args.append(insert_call(node, _CAST, (operand(value, node), wide)))
        else:
            args.append(value)
    if not any(isinstance(value, Node) for value in args):
        return False
    _assert(insert_call(node, function, tuple(args)), node, target, node, slack=4 * torch.finfo(wide).eps)
    return True


def _assert(number: Node, value: Node, target: torch.dtype, user: Node, *, slack: float = 0.0) -> None:
    # A power of two, and exact in every float.
    limit = float(int(largest(target)) + 1) * (1 - slack)
    small = insert_call(
        user, torch.ops.aten.lt.Scalar, (insert_call(user, torch.ops.aten.abs.default, (number,)), limit)
    )
    every = insert_call(user, torch.ops.aten.all.default, (small,))
    source = source_line(value)
    place = f"{value.name} ({op_name(value)}){f' at {source}' if source else ''}"
    text = f"an integer of {place} does not fit {short(target)}, which the device has instead of int64"
    insert_call(user, torch.ops.aten._assert_async.msg, (every, text))


def _widest(legal: Legal) -> torch.dtype | None:
    return next((d for d in (torch.float64, torch.float32, torch.bfloat16) if d in legal.compute), None)


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


class Values:
    """The values of one region while it is rewritten.

    Args:
        module: the region.
        legal: what the device has.
        decisions: where they go.

    Attributes:
        modified: whether anything was changed.
        expected: the dtypes that the program has at each node.
        ranges: what is proved of integers.
        written: storages that the region writes to.
    """

    def __init__(self, module: GraphModule, legal: Legal, decisions: Decisions) -> None:
        self.module, self.graph = module, module.graph
        self.legal, self.decisions = legal, decisions
        self.modified = False
        self.expected: dict[Node, Any] = {node: dtypes(node) for node in self.graph.nodes}
        self.ranges = Ranges()
        self.written = {key for node in self.graph.nodes for key in written_storages(node)}
        self._training = decisions.context.training
        given = [node for node in self.graph.nodes if node.op in ("placeholder", "get_attr")]
        self._outside = self.written & {key for node in given for key in storages(node)}
        self._casts: dict[tuple[Node, torch.dtype, bool], Node] = {}

    def at_once(self, node: Node) -> bool:
        """Whether a value that is only stored is cast once for all its uses, views among them.

        So in training, where autograd adds up the gradients of several uses, which is to happen in the dtype that is
        computed in. Not where an input is written to: a view of a copy would not see that. What the graph made itself
        is cast when it is made, and written to afterwards.
        """
        known = storages(node).union(*map(storages, node.all_input_nodes))
        return self._training and self._outside.isdisjoint(known)

    def use(self, value: Node, user: Node) -> Node:
        """The value in a dtype to compute in."""
        dtype = fake_value(value).dtype
        return value if self.legal.computes(dtype) else self.cast(value, self.nearest(value, dtype), user)

    def cast(self, value: Node, target: torch.dtype, user: Node) -> Node:
        """A cast before `user`, shared with later ones unless the value is written to in between."""
        fixed = self.written.isdisjoint(storages(value))
        # A cast made under no_grad carries no gradient for a user outside; the other way round it does no harm.
        for grad in (True,) if torch.is_grad_enabled() else (True, False):
            if fixed and (value, target, grad) in self._casts:
                return self._casts[value, target, grad]
        source = fake_value(value).dtype
        if not self.legal.stores(source):
            self.decisions.chosen(value, source, target, stored=False)
            if source in INTEGERS and not self.ranges.fits(value, largest(target)):
                checked = not self.decisions.strict and insert(value, target, user, self.legal)
                what = "each call checks them" if checked else "values beyond wrap around, and are not checked"
                self.decisions.may_lose(value, source, target, f"its values are not known; {what}")
                self.ranges.set(value, largest(target))
            elif source.is_floating_point and loses_range(source, target):
                self._check_constant(value, source, target)
        cast = self.insert(user, CAST, (value, target))
        self.follow(cast, value)
        if fixed:
            self._casts[value, target, torch.is_grad_enabled()] = cast
        return cast

    def _check_constant(self, value: Node, source: torch.dtype, target: torch.dtype) -> None:
        known = constant(value)
        if known is None and self.decisions.strict:
            self.decisions.may_lose(value, source, target, "its values are not known")
        elif known is not None and known > largest(target):
            self.decisions.may_lose(value, source, target, f"its value {known} becomes infinite")

    def check_range(self, node: Node) -> None:
        """Prove, check at run time, or tell that an integer result may not fit; likewise a float's in `error`."""
        expected = self.expected[node]
        written = writes_to(node)
        if written is not None:
            self.ranges.forget(written)
        for dtype in {leaf.dtype for leaf in leaves(node)}:
            target = self.legal.nearest(dtype)
            if target is None or self.legal.computes(dtype) or not loses_range(dtype, target):
                continue
            if dtype not in INTEGERS:
                if self.decisions.strict and kind(node) not in MOVES:
                    self.decisions.may_lose(node, dtype, target, "its values are not known")
                continue
            numbers = beyond([v for v in literals(node) if type(v) is int])
            if numbers > largest(target) and isinstance(expected, torch.dtype):
                raise self.decisions.error(node, dtype, f"the number {numbers} does not fit {target}")
            if self.ranges.fits(node, largest(target)) or kind(node) in MOVES | {"getitem"}:
                continue
            if not self.decisions.strict and insert_arithmetic(node, target, self.legal, self.use):
                self.decisions.may_lose(node, dtype, target, "its values are not known; each call checks them")
                self.ranges.set(node, largest(target))
                self.modified = True
            else:
                self.decisions.may_lose(node, dtype, target, "values beyond wrap around, and are not checked")

    def record(self, node: Node) -> None:
        """Note for each missing dtype of the node what takes its place."""
        operands = [self.expected[operand] for operand in node.all_input_nodes]
        for dtype in dict.fromkeys(tree_leaves((self.expected[node], operands))):
            if isinstance(dtype, torch.dtype) and not self.legal.computes(dtype):
                target = self.nearest(node, dtype)
                self.decisions.chosen(node, dtype, target, stored=self.legal.stores(dtype))

    def missing_of(self, node: Node) -> torch.dtype:
        """A dtype that the program has at the node, and the device does not compute in."""
        operands = [self.expected.get(operand) for operand in node.all_input_nodes]
        found = tree_leaves((self.expected[node], operands))
        lacked = [d for d in found if isinstance(d, torch.dtype) and not self.legal.computes(d)]
        return lacked[0] if lacked else torch.get_default_dtype()

    def nearest(self, node: Node, dtype: torch.dtype) -> torch.dtype:
        """What takes the place of a dtype.

        Raises:
            LegaliseError: the device has nothing that could.
        """
        target = self.legal.nearest(dtype)
        if target is None:
            raise self.decisions.error(node, dtype, "it has none of its kind that could take its place")
        return target

    def insert(self, anchor: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        """Insert a call before `anchor`."""
        node = insert_call(anchor, target, args, kwargs)
        self.expected[node] = dtypes(node)
        self.modified = True
        return node

    def follow(self, cast: Node, value: Node) -> None:
        """`cast` stands for `value` from here on."""
        self.expected[cast] = self.expected[value]
        self.ranges.set(cast, self.ranges.of(value))
