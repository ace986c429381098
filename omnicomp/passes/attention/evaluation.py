"""Terms evaluated by torch: what an expression over indices is, element by element, in the dtypes of the program."""

from collections.abc import Mapping
from typing import Any, Final

import torch

from omnicomp._torch.symbols import expression
from omnicomp.passes.attention.terms import Apply, Axis, Index, Number, Position, Term

__all__ = ["can_evaluate", "evaluate"]

_LOGICAL: Final[dict[str, tuple[Any, Any]]] = {
    "and": (torch.logical_and, torch.bitwise_and),
    "or": (torch.logical_or, torch.bitwise_or),
    "xor": (torch.logical_xor, torch.bitwise_xor),
    "not": (torch.logical_not, torch.bitwise_not),
}
_FUNCTIONS: Final[dict[str, Any]] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "where")},
    **{name: getattr(torch, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "exp", "log", "tanh")},
    **{name: getattr(torch, name) for name in ("sigmoid", "sqrt", "rsqrt", "relu", "sin", "cos", "erf", "floor")},
    **{name: getattr(torch, name) for name in ("reciprocal", "log1p")},
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "softplus": torch.nn.functional.softplus,
}


def can_evaluate(term: Term) -> bool:
    """Whether `term` holds only indices of known sizes, known numbers and operations: no data, nothing symbolic."""
    seen: set[int] = set()
    stack: list[Term] = [term]
    while stack:
        part = stack.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Apply):
            if part.op not in _FUNCTIONS and part.op not in _LOGICAL and part.op != "cast":
                return False
            stack.extend(part.args)
        elif isinstance(part, Index):
            sizes = [axis.size for axis in part.position.flat()]
            if not all(_is_plain(value) for value in (part.start, part.step, part.position.start, *sizes)):
                return False
        elif not (isinstance(part, Number) and _is_plain(part.value)):
            return False
    return True


def evaluate(term: Term, digits: Mapping[Axis, torch.Tensor]) -> torch.Tensor:
    """The value of `term` at the given values of its axes.

    Args:
        term: one that `can_evaluate` accepts.
        digits: for each axis of the term, int64 values of it; all broadcast together.

    Returns:
        A tensor of the term's dtype, as large as the axes in the term make it, on the CPU.
    """
    known: dict[int, torch.Tensor] = {}

    def visit(part: Term) -> torch.Tensor:
        if id(part) not in known:
            known[id(part)] = compute(part)
        return known[id(part)]

    def compute(part: Term) -> torch.Tensor:
        if isinstance(part, Number):
            return torch.tensor(expression(part.value), dtype=part.dtype)
        if isinstance(part, Index):
            at = _position(part.position, digits)
            return (at * expression(part.step) + expression(part.start)).to(part.dtype)
        if not isinstance(part, Apply):
            raise TypeError(f"a {type(part).__name__} has no value that is known at compile time")
        args = [visit(argument) for argument in part.args]
        if part.op == "cast":
            return args[0].to(part.dtype)
        if part.op in _LOGICAL:
            return _LOGICAL[part.op][0 if part.dtype is torch.bool else 1](*args)
        return _FUNCTIONS[part.op](*args).to(part.dtype)

    return visit(term)


def _position(position: Position, digits: Mapping[Axis, torch.Tensor]) -> torch.Tensor:
    value = torch.zeros((), dtype=torch.int64)
    for axis in position.flat():
        value = value * expression(axis.size) + digits[axis]
    return value + expression(position.start)


def _is_plain(value: Any) -> bool:
    return isinstance(expression(value), bool | int | float)
