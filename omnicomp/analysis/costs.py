"""What a graph costs: floating-point operations and bytes moved, as SymPy expressions in the graph's own symbols.

FLOPs of products, convolutions and attention come from `torch.utils.flop_counter`'s formulas, run on symbolic shapes;
every other operator that makes a tensor counts one operation an element. Nothing here adds a guard to the shape
environment: sizes are read as expressions, never compared.
"""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import sympy
import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from omnicomp import records
from omnicomp._torch.symbols import known_range
from omnicomp.analysis.nodes import fake_value

_FREE_OPS = frozenset(
    {"getitem", "view", "reshape", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "alias", "slice"}
    | {"select", "as_strided", "detach", "sym_size", "split", "split_with_sizes", "unbind", "_unsafe_view", "empty"}
)

_LOOKUPS: Final = frozenset((torch.ops.aten.embedding.default, torch.ops.aten.index_select.default))

# The flop counter has no entry for the CPU's fused attention, which takes the arguments of the GPU's.
_SAME_FLOPS: Final[dict[str, Any]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": torch.ops.aten._scaled_dot_product_flash_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}


@records.dataclass(frozen=True, kw_only=True)
class Cost:
    """FLOPs of one call, as an expression and for the sizes seen at compile time (-1 where a size has no hint)."""

    flops: sympy.Expr
    flops_hint: int


def cost_of(nodes: Iterable[Node]) -> Cost:
    """Sum the FLOPs of nodes of a post-autograd graph."""
    total = sympy.Integer(0)
    hints: dict[sympy.Symbol, int] = {}
    for node in nodes:
        flops = _node_flops(node, hints)
        if flops is not None:
            total += flops
    return Cost(flops=total, flops_hint=hint(total, hints))


def size_of(values: Iterable[Any]) -> tuple[sympy.Expr, int]:
    """Bytes of fake tensors, as an expression and for the sizes seen at compile time (-1 if unknown)."""
    hints: dict[sympy.Symbol, int] = {}
    total = sympy.Integer(0)
    for value in values:
        total += value_bytes(value, hints)
    return total, hint(total, hints)


def read_of(placeholder: Node, value: Any) -> list[Any]:
    """The fake values that are read of an input: its own, or of a table the rows that are looked up."""
    rows = [fake_value(user) for user in placeholder.users if user.target in _LOOKUPS and user.args[0] is placeholder]
    return rows if rows and len(rows) == len(placeholder.users) else [value]


def value_bytes(value: Any, hints: dict[sympy.Symbol, int]) -> sympy.Expr:
    """Bytes of the tensors in `value` (a fake tensor, or a nest of them)."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return sum((_numel(leaf, hints) * leaf.element_size() for leaf in leaves), sympy.Integer(0))


def hint(expression: sympy.Expr, hints: Mapping[sympy.Symbol, int]) -> int:
    """The value of an expression for the sizes seen at compile time; -1 if a symbol has none."""
    value: Any = expression.subs(list(hints.items()))  # type: ignore[arg-type]
    return int(value) if value.is_number and value.is_finite is not False else -1


def known_sizes(values: Iterable[Any]) -> dict[str, int]:
    """The sizes that the symbols of a graph were seen with at compile time, by the symbol's name.

    Args:
        values: the graph's inputs; any symbolic one knows the shape environment of all.
    """
    environment = next((v.node.shape_env for v in values if isinstance(v, torch.SymInt)), None)
    return {str(symbol): int(size) for symbol, size in _backed(environment).items()}


def hint_of_text(text: str, sizes: Mapping[str, int]) -> int:
    """The value of a printed expression for sizes by name; -1 if a symbol has none or the text is no expression."""
    if text.isdigit():
        return int(text)
    try:
        expression: Any = sympy.sympify(text)
    except (sympy.SympifyError, SyntaxError, TypeError):
        return -1
    return hint(expression, {symbol: sizes[symbol.name] for symbol in expression.free_symbols if symbol.name in sizes})


def _backed(environment: Any) -> Mapping[Any, Any]:
    """Values of the symbols of input sizes; the ragged size of a nested tensor has no number."""
    known = getattr(environment, "backed_var_to_val", None)  # empty where data decides every size
    known = known if known is not None else getattr(environment, "var_to_val", {})
    return {symbol: size for symbol, size in known.items() if isinstance(size, (int, sympy.Integer))}


def _node_flops(node: Node, hints: dict[sympy.Symbol, int]) -> sympy.Expr | None:
    if node.op != "call_function":
        return None
    target = node.target
    name = getattr(target, "overloadpacket", target)
    short = getattr(name, "__name__", str(name)).rsplit(".", 1)[-1]
    if short in _FREE_OPS:
        return None
    value = fake_value(node)
    formula = flop_registry.get(_SAME_FLOPS.get(str(name), name))
    if formula is not None:
        flops = _formula(formula, node, value, hints)
        if flops is not None:
            return flops
    outputs = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    if not outputs:
        return None
    return sum((_numel(leaf, hints) for leaf in outputs), sympy.Integer(0))


def _formula(formula: Any, node: Node, value: Any, hints: dict[sympy.Symbol, int]) -> sympy.Expr | None:
    """Run a formula of the flop counter on symbolic shapes; None if it needs real numbers that are not there."""
    raw = inspect.unwrap(formula)  # the registered formula takes tensors; what it wraps takes shapes
    if raw is formula:
        return None

    def shape(item: Any) -> Any:
        item = fake_value(item)
        if isinstance(item, torch.Tensor):
            return tuple(_expression(size, hints) for size in item.shape)
        return item

    args = tree_map(shape, node.args, is_leaf=lambda item: isinstance(item, (Node, torch.Tensor)))
    kwargs = tree_map(shape, dict(node.kwargs), is_leaf=lambda item: isinstance(item, (Node, torch.Tensor)))
    try:
        return sympy.sympify(raw(*args, **kwargs, out_shape=tree_map(shape, value)))
    except (AssertionError, TypeError, ValueError, AttributeError, IndexError):
        # A formula asserts equalities that hold, but not symbolically: count elements instead.
        return None


def _numel(tensor: torch.Tensor, hints: dict[sympy.Symbol, int]) -> sympy.Expr:
    return math.prod((_expression(size, hints) for size in tensor.shape), start=sympy.Integer(1))


def _expression(size: Any, hints: dict[sympy.Symbol, int]) -> sympy.Expr:
    if not isinstance(size, torch.SymInt):
        return sympy.Integer(int(size))
    expression = size.node.expr
    known = _backed(size.node.shape_env)
    symbols: Sequence[sympy.Symbol] = list(expression.free_symbols)
    for symbol in symbols:
        if symbol in known:
            hints[symbol] = int(known[symbol])
        elif (most := known_range(size, symbol)[1]) is not None:
            hints[symbol] = most  # it depends on data
    return expression
