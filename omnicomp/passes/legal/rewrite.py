"""Operators that compute in a missing dtype whatever they are given, in terms of others."""

import contextlib
import math
from collections.abc import Callable, Collection
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg
from torch.utils._pytree import tree_leaves, tree_map

from omnicomp._torch.dtypes import ENTER, EXIT
from omnicomp._torch.symbols import free_unbacked_symbols
from omnicomp.analysis.nodes import evaluate, fake_value, op_name
from omnicomp.passes.attention.nodes import changes_grad_mode, kind
from omnicomp.passes.legal.decisions import Decisions
from omnicomp.passes.legal.dtypes import INTEGERS, Legal, largest, real
from omnicomp.passes.legal.fakes import (
    CAST,
    CASTS,
    FILLS,
    MAKES_INT64,
    MARK,
    STATISTICS,
    TAKES_DTYPE,
    WANTS_INT64,
    dtypes,
    gathers,
    is_tensor,
    leaves,
    literals,
    moves,
    storages,
    writes_to,
)
from omnicomp.passes.legal.values import Values


def _one_hot(node: Node, values: Values) -> bool:
    """A comparison with all classes; torch's own computes in int64."""
    classes = _argument(node, 1, "num_classes", -1)
    if not isinstance(classes, int) or classes < 0:
        return False
    values.record(node)
    index = values.use(_argument(node, 0, "input", None), node)
    fake = fake_value(index)
    every = values.insert(node, torch.arange, (classes,), {"dtype": fake.dtype, "device": fake.device})
    equal = values.insert(node, torch.eq, (values.insert(node, torch.unsqueeze, (index, -1)), every))
    _put(values.insert(node, CAST, (equal, fake.dtype)), node, values)
    return True


def _scaled_mm(node: Node, values: Values) -> bool:
    """`(a * scale_a) @ (b * scale_b) + bias`, with the scales of a tensor, or of rows of `a` and columns of `b`.

    The scales are floats of no dimension, or `[rows, 1]` and `[1, columns]`; those of blocks are not understood.
    """
    operands: list[Node] = []
    for index, side in enumerate(("self", "mat2")):
        matrix, scale = _argument(node, index, side, None), _argument(node, 2 + index, f"scale_{'ab'[index]}", None)
        if not isinstance(matrix, Node) or not isinstance(scale, Node):
            return False
        shape, sizes = fake_value(scale).shape, fake_value(matrix).shape
        if len(shape) not in (0, 2) and tuple(shape) != (1,):
            return False
        if len(shape) == 2 and (shape[1 - index] != 1 or shape[index] not in (1, sizes[index])):
            return False
        operands.append(values.insert(node, torch.mul, (values.use(matrix, node), values.use(scale, node))))
    if _argument(node, 5, "scale_result", None) is not None:
        return False
    values.record(node)
    result = values.insert(node, torch.matmul, tuple(operands))
    bias = _argument(node, 4, "bias", None)
    if isinstance(bias, Node):
        result = values.insert(node, torch.add, (result, values.use(bias, node)))
    expected = values.expected[node]
    if values.legal.computes(expected) and fake_value(result).dtype is not expected:
        result = values.insert(node, CAST, (result, expected))
    _put(result, node, values)
    return True


def _put(result: Node, node: Node, values: Values) -> None:
    node.replace_all_uses_with(result)
    values.follow(result, node)
    values.graph.erase_node(node)


def _argument(node: Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


DECOMPOSED: Final[dict[str, Callable[[Node, Values], bool]]] = {"one_hot": _one_hot, "_scaled_mm": _scaled_mm}
"""Each replaces a node, or returns False where it does not understand its arguments."""


_FLOAT: Final = frozenset(("float",))
_NUMBER: Final = frozenset(("float", "integer"))
_ANY: Final = frozenset(("float", "integer", "bool"))
_BITS: Final = frozenset(("view", "view_as_real", "view_as_complex"))


class Rewriting(Values):
    """One region on its way to the dtypes of a device.

    Args:
        module: the region; rewritten in place by `run`.
        legal: what the device has.
        decisions: where they go.
        root: whether the region is the whole graph, whose inputs and outputs the program sees. Of the others, the
            operator that calls them gets and gives what can be stored, or what takes its place.
    """

    def __init__(self, module: GraphModule, legal: Legal, decisions: Decisions, *, root: bool) -> None:
        super().__init__(module, legal, decisions)
        self.root = root
        self.entries: dict[Node, Node] = {}  # a written input that can't be stored -> the copy that stands for it
        self.state = contextlib.ExitStack()
        self.autocasts: dict[Node, Any] = {}

    def run(self) -> bool:
        """Rewrite the region.

        Returns:
            Whether anything was changed.

        Raises:
            LegaliseError: a range would be lost, and the policy says so; or no dtype of the device would do.
        """
        nodes = list(self.graph.nodes)
        first = next(node for node in nodes if node.op != "placeholder")
        with self.state:
            grad = torch.is_grad_enabled()
            try:
                if self.root:
                    self._leave_surrounding_autocast(first, nodes[-1])
                for node in nodes:
                    if node.op == "placeholder":
                        self._input(node, first)
                    elif node.op == "output":
                        self._output(node)
                    elif node.op in ("call_function", "call_method") and MARK not in node.meta:
                        self._call(node)
            finally:
                torch.set_grad_enabled(grad)
        return self.modified

    def _input(self, node: Node, first: Node) -> None:
        """Inputs that the device can't store: those of inner regions come converted, written ones are entered once."""
        fake = fake_value(node)
        if not isinstance(fake, torch.Tensor) or self.legal.stores(fake.dtype):
            return
        if not self.root:
            target = self.nearest(node, fake.dtype)
            node.meta = {**node.meta, "example_value": evaluate(CAST, (fake, target), {}, like=fake)}
            if target in INTEGERS:
                self.ranges.set(node, largest(target))  # where it came from was checked
            self.modified = True
        elif not self.written.isdisjoint(storages(node)):
            users = [user for user in node.users if user.op != "output"]  # the cast, and its checks, are none of them
            cast = self.cast(node, self.nearest(node, fake.dtype), first)
            node.replace_all_uses_with(cast, lambda user: user in users)
            self.follow(cast, node)
            self.entries[node] = cast

    def _output(self, node: Node) -> None:
        for entered, copy in self.entries.items():
            self.insert(node, torch.Tensor.copy_, (entered, copy))
        replaced: dict[Node, Node] = {}
        for leaf in node.all_input_nodes:
            expected, actual = self.expected[leaf], dtypes(leaf)
            if not isinstance(expected, torch.dtype) or not isinstance(actual, torch.dtype):
                continue
            stored = expected if self.legal.stores(expected) else self.nearest(leaf, expected)
            if leaf.op == "placeholder" and self.root and not self.legal.stores(actual):
                continue  # it is handed through
            if stored is not expected:
                self.decisions.context.retyped.add((expected, stored))
            if actual is not stored and leaf not in replaced:
                replaced[leaf] = self.insert(node, CAST, (leaf, stored))
        if replaced:
            node.args = map_arg(node.args, lambda leaf: replaced.get(leaf, leaf))

    def _call(self, node: Node) -> None:
        if node.target in (ENTER, EXIT) or changes_grad_mode(node):
            self._change_state(node)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            self._call_region(node)
        elif self._is_touched(node):
            try:
                self._rewrite(node)
            except _Refused as refused:
                self.decisions.refused(node, refused.dtype, refused.why)

    def _is_touched(self, node: Node) -> bool:
        """Whether an operand is another than before, or anything of the node is of a dtype that is missing."""
        for operand in node.all_input_nodes:
            if dtypes(operand) != self.expected[operand]:
                return True
        found = [*leaves(node), *(leaf for operand in node.all_input_nodes for leaf in leaves(operand))]
        used = {leaf.dtype for leaf in found} | {v for v in literals(node) if isinstance(v, torch.dtype)}
        return not all(map(self.legal.computes, used))

    def _rewrite(self, node: Node) -> None:
        name = kind(node)
        for operand in node.all_input_nodes:
            self.ranges.of(operand)
        self.check_range(node)
        if name in DECOMPOSED:
            if not DECOMPOSED[name](node, self):
                raise _Refused(self.missing_of(node), "it is not understood with these arguments")
        elif name == "getitem" and not is_tensor(node.args[0]):
            several: Any = node.args[0]
            node.meta = {**node.meta, "example_value": fake_value(several)[node.args[1]]}
            if is_tensor(node) and not self.legal.stores(fake_value(node).dtype):
                several.meta = {**several.meta, MARK: True}
            self._legal_result(node)
        elif name in CASTS:
            self._convert(node, name)
        elif self.decisions.context.training and gathers(node):
            self._compute(node, name)  # its gradient is a sum
        elif name in FILLS or ((moves(node) or name == "getitem") and not (name in _BITS and self._reads_bits(node))):
            self._evaluate(node, *self._arguments(node, store=not self.at_once(node)))
            self._legal_result(node)
        elif name in _BITS and self._reads_bits(node):
            raise self.decisions.error(node, self.missing_of(node), "its bits are read, which no other dtype has")
        else:
            self._compute(node, name)

    def _compute(self, node: Node, name: str) -> None:
        """The operator on operands in dtypes that the device computes in."""
        target = writes_to(node)
        held = {}  # operands that are written to, but can only be stored -> the copy that is computed on
        if target is not None and not self.legal.computes(fake_value(target).dtype) and name not in ("copy_", "fill_"):
            held[target] = self._copy_in(target, node)
        for index in STATISTICS.get(name, ()):
            statistic: Any = node.args[index] if len(node.args) > index else None
            if isinstance(statistic, Node) and not self.legal.computes(fake_value(statistic).dtype):
                held[statistic] = self._copy_in(statistic, node)
        if target is not None and target not in held and not self.legal.computes(fake_value(target).dtype):
            held[target] = target
        self.record(node)
        self._promote(node, held)
        after = node.next
        for stored, copy in held.items():
            if stored is copy:
                continue
            self.insert(after, torch.Tensor.copy_, (stored, copy))
            if stored is target:
                node.replace_all_uses_with(stored)
        if target is None or not held:
            self._legal_result(node)

    def _promote(self, node: Node, held: dict[Node, Node]) -> None:
        """Evaluate the operator; where its operands would be promoted to a missing dtype, with all in another."""
        args, kwargs = node.args, node.kwargs
        # Integers and booleans become floats where a number or a mean makes them so; conditions stay what they are.
        for moved in ((), _FLOAT, _NUMBER, _ANY):
            made = [leaf.dtype for leaf in leaves(node) if leaf.is_floating_point()]
            joined = next((dtype for dtype in made if moved and not self.legal.computes(dtype)), None)
            if moved and joined is None:
                return
            node.args, node.kwargs = args, kwargs
            into = self.nearest(node, joined) if joined is not None else None
            self._evaluate(node, *self._arguments(node, store=False, held=held, moved=moved, into=into))
        made = [leaf.dtype for leaf in leaves(node) if leaf.is_floating_point()]
        if not all(map(self.legal.stores, made)):
            raise _Refused(self.missing_of(node), "it makes one of operands in others")

    def _copy_in(self, stored: Node, user: Node) -> Node:
        return self.insert(user, CAST, (stored, self.nearest(stored, fake_value(stored).dtype), False, True))

    def _arguments(
        self,
        node: Node,
        *,
        store: bool,
        held: dict[Node, Node] | None = None,
        moved: Collection[str] = (),
        into: torch.dtype | None = None,
    ) -> tuple[Any, Any]:
        """The arguments in dtypes that the device has, or only stores; of the kinds `moved`, in the dtype `into`."""
        known = self.legal.stores if store else self.legal.computes
        wide_indices = kind(node) in WANTS_INT64
        part = self._part(node)

        def argument(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return value if known(value) else self.nearest(node, value)
            if isinstance(value, float):
                return self._number(node, value)
            if not isinstance(value, Node):
                return value
            if held and value in held:
                return held[value]
            now, before = dtypes(value), self.expected[value]
            if MARK in value.meta:
                return value  # put in by an earlier run of the pass
            if wide_indices and before is torch.int64 and now in INTEGERS and not self.legal.stores(torch.int64):
                narrow = self.cast(value, self.nearest(value, now), node) if now is torch.int64 else value
                cast = self.insert(node, CAST, (narrow, torch.int64))
                cast.meta[MARK] = True
                return cast
            if not isinstance(now, torch.dtype):
                return value
            if into is not None and _kind_of(now) in moved:
                return value if now is into else self.cast(value, into, node)
            if not known(now):
                return self.cast(value, self.nearest(value, now), node)
            if part is not None and now.is_floating_point and now.itemsize > part.itemsize:
                return self.cast(value, part, node)
            return value

        return map_aggregate((node.args, dict(node.kwargs)), argument)  # type: ignore[return-value]

    def _part(self, node: Node) -> torch.dtype | None:
        """The dtype that real operands need for complex results to have one that is there; None if there are none."""
        made = [leaf.dtype for leaf in leaves(node) if leaf.is_complex() and not self.legal.computes(leaf.dtype)]
        return real(self.nearest(node, made[0])) if made else None

    def _number(self, node: Node, value: float) -> float:
        """A number, as it rounds to the dtype that takes the place of the node's."""
        source = dtypes(node)
        if not isinstance(source, torch.dtype) or self.legal.computes(source):
            return value
        if not source.is_floating_point:
            # The ends and the step of a range of int64 are truncated first; of other integers the elements are.
            return int(value) if kind(node) == "arange" and source is torch.int64 else value
        target = self.nearest(node, source)
        if math.isfinite(value) and abs(value) > largest(target):
            self.decisions.may_lose(node, source, target, f"the number {value} becomes infinite")
            return math.copysign(math.inf, value)
        return value

    def _evaluate(self, node: Node, args: Any, kwargs: Any) -> None:
        """Give the node its new arguments, and the fake value that it has with them."""
        target: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
        old = fake_value(node)
        if any(free_unbacked_symbols(leaf) for leaf in leaves(node)):
            value = self._follow_operand(node, args, old)
        else:
            if kind(node) in TAKES_DTYPE:
                args, kwargs = self._with_dtype(node, args, kwargs)
            try:
                value = evaluate(target, args, kwargs, like=old)
            except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError) as error:
                # It becomes a reason of the pass.
                raise _Refused(self.missing_of(node), f"it raises in another: {str(error).splitlines()[0]}") from error
        if (args, kwargs) != (node.args, node.kwargs):
            node.args, node.kwargs = args, kwargs
            self.modified = True
        if op_name(node).rpartition(".")[2] != "setitem":
            node.meta = {**node.meta, "example_value": value}

    def _with_dtype(self, node: Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Say the dtype of a result that would have a missing one by default."""
        expected = self.expected[node]
        if not isinstance(expected, torch.dtype) or any(
            isinstance(v, torch.dtype) for v in tree_leaves((args, kwargs))
        ):
            return args, kwargs
        if self.legal.computes(expected) or (kind(node) in FILLS and self.legal.stores(expected)):
            return args, kwargs
        operand: Any = args[0] if args else None
        follows = kind(node).endswith("_like") or kind(node).startswith("new_")
        if follows and isinstance(operand, Node) and self.legal.stores(fake_value(operand).dtype):
            return args, kwargs
        return args, {**kwargs, "dtype": self.nearest(node, expected)}

    def _follow_operand(self, node: Node, args: Any, old: Any) -> Any:
        """The value of an operator whose shape depends on data, and can't be had twice: the dtype is the operand's."""
        if kind(node) in MAKES_INT64:
            return old
        operand: Any = args[0] if args else None
        first: Any = node.args[0] if node.args else None
        before, now = self.expected.get(first), dtypes(operand)

        def leaf(value: Any) -> Any:
            same = isinstance(value, torch.Tensor) and value.dtype is before and isinstance(now, torch.dtype)
            return evaluate(CAST, (value, now), {}, like=value) if same and now is not value.dtype else value

        return tree_map(leaf, old)

    def _convert(self, node: Node, name: str) -> None:
        """A cast of the program: to what it says if that can be stored, else to the nearest."""
        before, after = node.args[0], self.expected[node]
        if not (isinstance(before, Node) and isinstance(after, torch.dtype)):
            return
        fake = fake_value(node)
        target = after if self.legal.stores(after) else self.nearest(node, after)
        if target is not after:
            self.record(node)
        # A cast that made a tensor of its own goes on to do so, where it would now return its operand.
        copies = self.expected[before] is not after or node.kwargs.get("copy") is True
        keeps = self.legal.stores(fake_value(before).dtype) and not self.at_once(node)
        source = before if keeps else self.use(before, node)
        if self.at_once(node) and not copies:
            target = self.nearest(node, after)
        kept = {key: node.kwargs[key] for key in ("memory_format", "non_blocking") if key in node.kwargs}
        old: Any = fake_value(before)
        kept |= {"copy": True} if copies and fake_value(source).dtype is target else {}
        kept |= {"device": fake.device} if fake.device != old.device else {}
        if source is before and target is after and fake_value(source).dtype is self.expected[before]:
            self._use_at_once(node)
            return
        node.op, node.target = "call_method", "to"
        node.args, node.kwargs = (source,), {"dtype": target, **kept}
        node.meta = {**node.meta, "example_value": evaluate(torch.Tensor.to, node.args, node.kwargs, like=fake)}
        self.modified = True
        self._use_at_once(node)

    def _use_at_once(self, node: Node) -> None:
        """In training, the rounded value goes on in the dtype that it is computed with."""
        dtype = fake_value(node).dtype
        if self.at_once(node) and dtype.is_floating_point and not self.legal.computes(dtype):
            cast = self.insert(node.next, CAST, (node, self.nearest(node, dtype)))
            node.replace_all_uses_with(cast, lambda user: user is not cast)
            self.follow(cast, node)

    def _legal_result(self, node: Node) -> None:
        """Cast a result whose dtype is the operator's own choice, and missing, as of an index, or not the program's."""
        actual, expected = dtypes(node), self.expected[node]
        if not isinstance(actual, torch.dtype):
            return
        if self.legal.stores(actual):
            # What the program has in a dtype that is there goes on in it.
            if not isinstance(expected, torch.dtype) or actual is expected or not self.legal.computes(expected):
                return
            target = expected
        else:
            target = self.nearest(node, actual)
            node.meta = {**node.meta, MARK: True}
        cast = self.insert(node.next, CAST, (node, target))
        node.replace_all_uses_with(cast, lambda user: user is not cast)
        self.follow(cast, node)

    def _call_region(self, node: Node) -> None:
        """A higher-order operator gets and gives what can be stored, or what takes its place."""

        def argument(value: Node) -> Node:
            expected, actual = self.expected[value], dtypes(value)
            if not isinstance(expected, torch.dtype) or not isinstance(actual, torch.dtype):
                return value
            want = expected if self.legal.stores(expected) else self.nearest(value, expected)
            return value if actual is want else self.cast(value, want, node)

        args, kwargs = map_arg((node.args, dict(node.kwargs)), argument)

        def result(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or self.legal.stores(value.dtype):
                return value
            return evaluate(CAST, (value, self.nearest(node, value.dtype)), {}, like=value)

        if (args, kwargs) != (node.args, node.kwargs):
            node.args, node.kwargs = args, kwargs
            self.modified = True
        node.meta = {**node.meta, "example_value": tree_map(result, fake_value(node))}

    def _change_state(self, node: Node) -> None:
        """Follow the graph into autocast and out of no_grad, so that operators are evaluated as they will run."""
        if node.target is ENTER:
            device, given, enabled, cache = (*node.args, None, None, None)[:4]
            dtype: Any = given or torch.get_autocast_dtype(str(device))
            if enabled and not self.legal.computes(dtype):
                target, stored = self.nearest(node, dtype), self.legal.stores(dtype)
                self.decisions.chosen(node, dtype, target, stored=stored, note="autocast is off there")
                node.args = (device, dtype, False, cache)
                self.modified = True
            self.autocasts[node] = ENTER(*node.args)
            self.state.callback(self._leave, node)
        elif node.target is EXIT:
            self._leave(node.args[0])  # type: ignore[arg-type]
        elif node.target is torch._C._set_grad_enabled:
            torch.set_grad_enabled(bool(node.args[0]))

    def _leave_surrounding_autocast(self, first: Node, last: Node) -> None:
        """Autocast around the compiled function is in force in the graph as well."""
        device = self.decisions.context.device.type
        if not torch.is_autocast_enabled(device):
            return
        dtype = torch.get_autocast_dtype(device)
        if self.legal.computes(dtype):
            return
        with self.graph.inserting_before(first):
            enter = self.graph.call_function(ENTER, (device, dtype, False, torch.is_autocast_cache_enabled()))
        with self.graph.inserting_before(last):
            leave = self.graph.call_function(EXIT, (enter,))
        for node in (enter, leave):
            node.meta["example_value"] = None
            self.expected[node] = None
        note = "autocast is off in the graph"
        self.decisions.chosen(first, dtype, self.nearest(first, dtype), stored=self.legal.stores(dtype), note=note)
        self.modified = True
        self._change_state(enter)

    def _leave(self, node: Node) -> None:
        entered = self.autocasts.pop(node, None)
        if entered is not None:
            EXIT(entered)

    def _reads_bits(self, node: Node) -> bool:
        """Whether a view is one of bits, of a dtype that can't be kept."""
        changed = {self.expected[operand] for operand in node.all_input_nodes} | {self.expected[node]}
        bits = kind(node) != "view" or any(isinstance(v, torch.dtype) for v in literals(node))
        return bits and not all(self.legal.stores(d) for d in changed if isinstance(d, torch.dtype))


def _kind_of(dtype: torch.dtype) -> str:
    return "float" if dtype.is_floating_point else "integer" if dtype in INTEGERS else "bool"


class _Refused(Exception):
    """An operator does not take other dtypes than the program's."""

    def __init__(self, dtype: torch.dtype, why: str) -> None:
        super().__init__(why)
        self.dtype, self.why = dtype, why
