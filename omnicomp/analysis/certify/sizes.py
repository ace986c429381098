"""Small sizes for graphs: numbers for the symbols of their shapes, and smaller numbers in place of those written there.

A graph with numbers for sizes is one of a family. `Family` finds which of its numbers are products or sums of others,
by running it on tensors without data, and writes the graph again with other numbers: the order of the numbers stays,
and differences of at most two between neighbours. Numbers up to four stay what they are, as they are often structure.
"""

import contextlib
import dataclasses
import itertools
import math
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from omnicomp._torch.fx import copy_module, fake_value
from omnicomp._torch.symbols import hints_of
from omnicomp.analysis.certify import interpret, values
from omnicomp.analysis.certify.values import State
from omnicomp.analysis.nodes import op_name

_SMALL: Final = (2, 3, 4, 5, 6, 7)
STRUCTURE: Final = 4
_META: Final = torch.device("meta")
_CPU: Final = torch.device("cpu")
_SYMBOLIC: Final = (torch.SymInt, torch.SymFloat)
# Numbers of a program are varied by fractions of this denominator, which the algebra and their quotients have exactly.
_PARTS: Final = 2**13
_NO_SIZE: Final = 1 << 31
# From which attempt on symbols may be as in another assignment, or be sizes up to twice those of the first call.
_NEARBY: Final = 100


def placeholders(module: GraphModule) -> list[Node]:
    """The placeholders of a graph."""
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def with_numbers(*modules: GraphModule) -> list[GraphModule]:
    """The graphs, in which numbers that all of them do nothing with but read of a tensor are inputs themselves.

    With `dynamic=True` Dynamo keeps the numbers of a program, such as a scale, in tensors of one element.
    """
    read: dict[str, Any] = {}
    for module in modules:
        for node in placeholders(module):
            users = list(node.users)
            numbers = [fake_value(user) for user in users if base_name(user) in ("item", "_local_scalar_dense")]
            if len(numbers) < len(users) or any(not isinstance(each, _SYMBOLIC) for each in numbers):
                read[node.name] = None
            elif numbers:
                read.setdefault(node.name, numbers[0])
    if not any(each is not None for each in read.values()):
        return list(modules)
    found = [copy_module(module) for module in modules]
    for module in found:
        for node in placeholders(module):
            if (number := read.get(node.name)) is None:
                continue
            for user in list(node.users):
                user.replace_all_uses_with(node)
                module.graph.erase_node(user)
            node.meta = {"example_value": number}
        module.recompile()
    return found


def symbols_of(module: GraphModule) -> list[Any]:
    """The symbols in the shapes of the placeholders, and those that are numbers of the program, in order."""
    found: dict[Any, None] = {}
    for node in placeholders(module):
        value = fake_value(node)
        numbers = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
        for each in numbers:
            if isinstance(each, _SYMBOLIC):
                for symbol in sorted(each.node.expr.free_symbols, key=str):
                    found[symbol] = None
    return list(found)


def first(module: GraphModule) -> dict[Any, Any]:
    """The numbers that the symbols had in the first call."""
    values = [fake_value(node) for node in placeholders(module)]
    leaves = [each for value in values for each in (value.shape if isinstance(value, torch.Tensor) else (value,))]
    return {each.node.expr: each.node.hint for each in leaves if isinstance(each, _SYMBOLIC)}


def sized(numbers: Mapping[Any, Any]) -> dict[Any, int]:
    """The symbols that are sizes, and none of the program's other numbers."""
    return {symbol: value for symbol, value in numbers.items() if symbol.is_integer}


def rounds(module: GraphModule) -> bool:
    """Whether a graph has sizes that are no polynomials of symbols, such as half of one, rounded."""
    for node in module.graph.nodes:
        for value in _flat(fake_value(node)):
            for each in value.shape if isinstance(value, torch.Tensor) else (value,):
                if isinstance(each, torch.SymInt):
                    expr = each.node.expr
                    if not expr.is_polynomial(*expr.free_symbols):
                        return True
    return False


def assignments(module: GraphModule, count: int, seed: int) -> Iterator[Mapping[Any, Any]]:
    """Small numbers for the symbols that the guards of the shape environment allow; at most `count` assignments.

    Each symbol has another number in each, where the guards let it: what is right for one number alone is seen. Numbers
    of the program are first what they were, then of any sign and magnitude, and then near what they were.
    """
    symbols = symbols_of(module)
    if not symbols:
        yield {}
        return
    environment = _environment(module)
    known, hints = first(module), hints_of(environment)
    draw = random.Random(seed)
    seen: list[tuple[Any, ...]] = []
    for attempt in range(2 * _NEARBY):
        numbers: dict[Any, Any] = {}
        pool = list(_SMALL)
        draw.shuffle(pool)
        for index, symbol in enumerate(symbols):
            if not symbol.is_integer:
                numbers[symbol] = _real(known.get(symbol), len(seen), draw, module, symbol)
                continue
            low, high = _range(environment, symbol)
            seen_first = int(hints.get(symbol, 0))
            if attempt >= _NEARBY and seen_first > _SMALL[-1]:
                # As where a guard is about the number of patches of an image.
                numbers[symbol] = draw.randint(low, max(low, min(2 * seen_first, high)))
                continue
            choice = pool[index % len(pool)] if attempt % 3 < 2 else draw.choice(_SMALL)
            choice = max(choice, low) + (draw.randrange(3) if low > _SMALL[-1] else 0)
            numbers[symbol] = min(choice, high)
        key = tuple(numbers.values())
        near = any(same == other for known in seen for same, other in zip(key, known, strict=True))
        if key in seen or (near and attempt < _NEARBY) or not _allowed(environment, numbers):
            continue
        seen.append(key)
        yield numbers
        if len(seen) == count:
            return


def _real(known: float | None, turn: int, draw: random.Random, module: GraphModule, symbol: Any) -> sympy.Float:
    """A number in place of one of the program's, with which all that it computes of it alone is a real number."""
    size = 2.0 ** math.frexp(known or 1.0)[1] / _PARTS
    near = math.copysign(draw.randrange(_PARTS // 4, _PARTS) * size, known or 1.0)
    far = draw.choice((-1, 1, -1)) * draw.randrange(1, _PARTS) * size * draw.choice((0.25, 1, 4))
    wanted = [each for each in ((known,), (far, near), (near, far))[min(turn, 2)] if each is not None]
    for each in (*wanted, near, known or 1.0):
        number = sympy.Float(each)
        if _allowed(_environment(module), {symbol: number}) and _defined(module, {symbol: number}):
            return number
    return sympy.Float(known or 1.0)


def _defined(module: GraphModule, numbers: Mapping[Any, Any]) -> bool:
    """Whether what a graph computes of numbers is real and finite."""
    for node in module.graph.nodes:
        value = fake_value(node)
        if isinstance(value, torch.SymFloat):
            found = value.node.expr.xreplace(numbers)
            if not found.free_symbols and not (found.is_extended_real and found.is_finite):
                return False
    return True


def _environment(module: GraphModule) -> Any:
    for node in placeholders(module):
        value = fake_value(node)
        numbers = [*value.shape] if isinstance(value, torch.Tensor) else [value]
        for each in numbers:
            if isinstance(each, _SYMBOLIC):
                return each.node.shape_env
    return None


def _range(environment: Any, symbol: Any) -> tuple[int, int]:
    bounds = environment.var_to_range.get(symbol) if environment is not None else None
    if bounds is None:
        return 2, 64
    low, high = (2 if bounds.lower < -(1 << 30) else int(bounds.lower)), 1 << 30
    high = int(bounds.upper) if bounds.upper < high else high
    return max(low, 1), high


def allowed(module: GraphModule, numbers: Mapping[Any, Any]) -> bool:
    """Whether the guards of a graph allow numbers for its symbols."""
    environment = _environment(module)
    ranges = ((number, *_range(environment, symbol)) for symbol, number in sized(numbers).items())
    within = all(low <= number <= high for number, low, high in ranges)
    return within and _allowed(environment, numbers)


def _allowed(environment: Any, numbers: Mapping[Any, Any]) -> bool:
    return all(guard.expr.xreplace(numbers) != sympy.false for guard in getattr(environment, "guards", ()))


def number(value: Any, numbers: Mapping[Any, int]) -> Any:
    """A size with numbers for its symbols."""
    if isinstance(value, torch.SymInt):
        return int(value.node.expr.xreplace(numbers))
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return (float if isinstance(value, torch.SymFloat) else bool)(value.node.expr.xreplace(numbers))
    return value


# ---- graphs with numbers for sizes

_RESHAPING: Final = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsafe_view")
_SIZED: Final = frozenset(
    (
        *_RESHAPING,
        "expand", "repeat", "arange", "ones", "zeros", "full", "empty", "slice", "narrow", "split", "split_with_sizes",
        "getitem", "new_zeros", "new_ones", "new_full", "new_empty", "iota", "index_select", "broadcast_to",
        "tensor_split", "setitem", "linspace", "eye", "_reshape_alias", "tril_indices", "layer_norm",
        "native_layer_norm", "rms_norm", "_fused_rms_norm", "as_strided",
    )
)  # fmt: skip
"""Operators whose integers are sizes or positions."""

_COMPARING: Final = frozenset(
    (
        "lt", "le", "gt", "ge", "eq", "ne", "add", "sub", "rsub", "tril", "triu", "clamp", "clamp_max", "iadd", "isub",
        "clamp_min", "floordiv", "floor_divide", "mod", "remainder", "fmod", "sym_min", "sym_max", "minimum", "maximum",
    )
)  # fmt: skip
"""Operators on integers and truth values whose numbers are positions."""


def base_name(node: Node) -> str:
    """The name of an operator without namespace and overload."""
    name = op_name(node)
    parts = name.split(".")
    if name.startswith(("aten.", "prims.")):
        return parts[1]
    return parts[-1]


@dataclasses.dataclass
class Family:
    """The numbers of two graphs, and how they depend on each other.

    Attributes:
        before: the first graph.
        after: the second.
        numbers: values for the symbols.
    """

    before: GraphModule
    after: GraphModule
    numbers: Mapping[Any, int]
    found: set[int] = dataclasses.field(default_factory=set)
    products: dict[int, list[tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    sums: dict[int, list[tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    literal: set[Node] = dataclasses.field(default_factory=set)
    scales: dict[Node, float] = dataclasses.field(default_factory=dict)
    elements: int = 0
    shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list[tuple[int, ...]])

    def learn(self, *, run: bool = True) -> bool:
        """Collect the numbers of both graphs, whose operators have the shapes that nodes say, or run without data.

        Args:
            run: whether to run them, which does not rest on what a pass said of its nodes.

        Returns:
            Whether they were run: sizes are symbols, or a node does not say what it is.

        Raises:
            Unsupported: a graph can't be run so.
        """
        for node in placeholders(self.before):
            value = fake_value(node)
            if isinstance(value, torch.Tensor):
                self.found.update(size for size in value.shape if not isinstance(size, torch.SymInt))
        described = [None if run or self.numbers else _described(module) for module in (self.before, self.after)]
        run = None in described
        for module, calls in zip((self.before, self.after), described, strict=True):
            if not run:
                for call in calls or ():
                    self._watch(*call)
                continue
            inputs = [empty(fake_value(node), self.numbers) for node in placeholders(module)]
            with values.running(State(device=_META, watch=self._watch)), _META:
                interpret.run(module, inputs)
        self.found = {each for each in self.found if each > STRUCTURE}
        return run

    def _watch(self, node: Node, args: Any, kwargs: Any, result: Any) -> None:
        name = base_name(node)
        operands = [each for each in _flat((args, kwargs)) if isinstance(each, torch.Tensor)]
        for each in _flat(result):
            if isinstance(each, torch.Tensor):
                self.elements += each.numel()
                self.shapes.append(tuple(each.shape))
        integers = not any(each.is_floating_point() for each in operands)
        if name in _SIZED or (name in _COMPARING and (integers or name in ("tril", "triu"))):
            self.literal.add(node)
            numbers = [abs(each) for each in _flat((args, kwargs)) if type(each) is int]
            self.found.update(each for each in numbers if each < _NO_SIZE)
        if name in _RESHAPING and operands and isinstance(result, torch.Tensor):
            for whole, parts in _groups(operands[0].shape, result.shape):
                self.products.setdefault(whole, []).append(parts)
        if name == "as_strided" and isinstance(result, torch.Tensor):
            inner = [tuple(result.shape[dim + 1 :]) for dim in range(result.ndim)]
            for stride, parts in zip(result.stride(), inner, strict=True):
                if len(parts) > 1 and stride == math.prod(parts):
                    self.products.setdefault(stride, []).append(parts)
        if name in ("cat", "concat", "concatenate") and isinstance(result, torch.Tensor):
            dims = [dim for dim in range(result.ndim) if result.shape[dim] != operands[0].shape[dim]]
            for dim in dims:
                parts = tuple(each.shape[dim] for each in operands)
                self.sums.setdefault(result.shape[dim], []).append(parts)
        if name in ("split", "chunk", "unbind", "split_with_sizes", "tensor_split") and isinstance(
            result, (tuple, list)
        ):
            for dim in range(operands[0].ndim if name != "unbind" else 0):
                parts = tuple(each.shape[dim] for each in result)
                if sum(parts) == operands[0].shape[dim] and len(parts) > 1:
                    self.sums.setdefault(operands[0].shape[dim], []).append(parts)
        if "scaled_dot_product" in name and "backward" not in name:
            query, key = operands[0], operands[1]
            if kwargs.get("scale") is None:
                self.scales[node] = 1 / math.sqrt(query.shape[-1])
            heads, shared = query.shape[-3:-2], key.shape[-3:-2]
            if heads and heads != shared:
                self.products.setdefault(heads[0], []).append((shared[0], heads[0] // shared[0]))

    def smaller(self, keep: int, start: int) -> Mapping[int, int] | None:
        """Other numbers for those of the graphs, or None if what they are made of does not allow it.

        Args:
            keep: numbers up to this stay.
            start: the smallest new number.
        """
        made: dict[int, int] = {}
        known = sorted(self.found)
        fresh = itertools.count(start)
        anchors: list[int] = []
        for each in known:
            if each <= keep:
                made[each] = each
                continue
            near = next((other for other in reversed(anchors) if each - other <= 2 and other > 2 * STRUCTURE), None)
            parts = self._parts(each, made)
            if parts is not None:
                made[each] = parts
            elif near is not None:
                made[each] = made[near] + each - near
            else:
                made[each] = max(
                    next(fresh), *(v + 1 for k, v in made.items() if k < each and not self._composite(k)), 0
                )
            anchors.append(each)
        return made if all(self._holds(each, made) for each in known) else None

    def elements_of(self, made: Mapping[int, int]) -> int:
        """About how many elements all results have with other numbers; sizes that depend on a symbol stay."""
        return sum(math.prod(made.get(size, size) for size in shape) for shape in self.shapes)

    def _composite(self, whole: int) -> bool:
        return whole in self.products or whole in self.sums

    def _parts(self, whole: int, made: Mapping[int, int]) -> int | None:
        for table, join in ((self.products, math.prod), (self.sums, sum)):
            for parts in table.get(whole, ()):
                if all(part in made or part <= STRUCTURE for part in parts):
                    return join(made.get(part, part) for part in parts)
        return None

    def _holds(self, whole: int, made: Mapping[int, int]) -> bool:
        return all(
            join(made.get(part, part) for part in parts) == made[whole]
            for table, join in ((self.products, math.prod), (self.sums, sum))
            for parts in table.get(whole, ())
            if all(part in made or part <= STRUCTURE for part in parts)
        )

    def resized(self, module: GraphModule, made: Mapping[int, int]) -> GraphModule:
        """A graph with other numbers; scales that attention takes from its sizes stay what they were."""
        copy = copy_module(module, lazy=True)

        def other(value: Any) -> Any:
            if type(value) is int:
                return made.get(value, value) if value >= 0 else -made.get(-value, -value)
            return value

        def rewrite(olds: GraphModule, news: GraphModule) -> None:
            for old, new in zip(olds.graph.nodes, news.graph.nodes, strict=True):
                if old in self.literal:
                    new.args = _mapped(new.args, other)
                    new.kwargs = _mapped(new.kwargs, other)
                if old in self.scales:
                    new.kwargs = {**new.kwargs, "scale": self.scales[old]}
                if old.op == "get_attr":
                    inner = operator.attrgetter(old.target)(olds)
                    if isinstance(inner, GraphModule):
                        rewrite(inner, operator.attrgetter(new.target)(news))

        rewrite(module, copy)
        return copy


def _described(module: GraphModule) -> list[tuple[Node, Any, Any, Any]] | None:
    """The calls of a graph with fake tensors for its values; None if a node has none, or calls a graph."""
    found: list[tuple[Node, Any, Any, Any]] = []
    known: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        known[node] = value = _held(module, node) if node.op == "get_attr" else fake_value(node)
        if value is None or isinstance(value, GraphModule):
            return None
        if node.op.startswith("call_"):
            found.append((node, *map_arg((node.args, node.kwargs), known.__getitem__), value))
    return found


def _held(module: GraphModule, node: Node) -> Any:
    return operator.attrgetter(str(node.target))(module)


def traced(modules: Sequence[GraphModule], wanted: Sequence[Any], limit: int = 0) -> tuple[list[Any], int]:
    """The shapes of the outputs of graphs for inputs as `inputs.shapes` has them, and the elements of all results.

    Kernels of the CPU run on small tensors in a tenth of the time that Python takes to find what they would return, so
    graphs run on zeros as long as they have no more elements than `limit`, and else on tensors without data.
    """
    if limit:
        with contextlib.suppress(Exception):  # zeros may be no valid inputs; without data it is tried again
            return _traced(modules, wanted, _CPU, limit)
    return _traced(modules, wanted, _META, 0)


def _traced(
    modules: Sequence[GraphModule], wanted: Sequence[Any], device: torch.device, limit: int
) -> tuple[list[Any], int]:
    shapes: list[Any] = []
    elements = 0

    def count(node: Node, args: Any, kwargs: Any, result: Any) -> None:
        nonlocal elements
        elements += sum(each.numel() for each in _flat(result) if isinstance(each, torch.Tensor))
        if limit and elements > limit:
            raise values.Unsupported("too many elements")

    for module in modules:
        dtypes = [getattr(fake_value(node), "dtype", None) for node in placeholders(module)]
        inputs = [_zeros(each, dtype, device) for each, dtype in zip(wanted, dtypes, strict=True)]
        with values.running(State(device=device, watch=count)), torch.random.fork_rng(devices=[]), device:
            outputs = interpret.run(module, inputs)
        shapes.append([tuple(each.shape) if isinstance(each, torch.Tensor) else each for each in outputs])
    return shapes, elements


def _zeros(each: Any, dtype: torch.dtype | None, device: torch.device) -> Any:
    if not isinstance(each, tuple):
        return each
    made = torch.empty_strided(each[1], each[2], dtype=dtype, device=device)
    return made.zero_() if device == _CPU else made


def empty(value: Any, numbers: Mapping[Any, int], made: Mapping[int, int] | None = None) -> Any:
    """A tensor without data of the shape of a fake one; other values as numbers."""
    if not isinstance(value, torch.Tensor):
        return number(value, numbers)
    shape, stride = layout(value, numbers, made or {})
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=_META)


def layout(
    value: torch.Tensor, numbers: Mapping[Any, int], made: Mapping[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and dense strides of the same order for a placeholder, with other numbers."""
    shape = tuple(number(s, numbers) if isinstance(s, torch.SymInt) else made.get(s, s) for s in value.shape)
    old = [number(stride, numbers) for stride in value.stride()]
    order = sorted(range(len(shape)), key=lambda dim: (-old[dim], dim))
    stride, step = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return shape, tuple(stride)


def _groups(a: Sequence[int], b: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Which sizes a reshape makes of several, or several of one."""
    i = j = 0
    while i < len(a) and j < len(b):
        left, right = [a[i]], [b[j]]
        x, y = a[i], b[j]
        i, j = i + 1, j + 1
        while x != y:
            if x < y and i < len(a):
                left.append(a[i])
                x *= a[i]
                i += 1
            elif y < x and j < len(b):
                right.append(b[j])
                y *= b[j]
                j += 1
            else:
                return
        left, right = ([size for size in side if size != 1] for side in (left, right))
        if len(left) == 1 and len(right) > 1:
            yield left[0], tuple(right)
        elif len(right) == 1 and len(left) > 1:
            yield right[0], tuple(left)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _flat(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _flat(each)
    elif isinstance(value, slice):
        yield from (value.start, value.stop)
    else:
        yield value


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_mapped(each, function) for each in value])
    if isinstance(value, dict):
        return {key: _mapped(each, function) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(_mapped(value.start, function), _mapped(value.stop, function), value.step)
    return function(value)
