"""Terms for tests about masks: short constructors, axes with symbolic sizes, and an evaluator of its own in NumPy."""

from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from omnicomp.passes.attention.terms import Apply, Axis, Index, Number, Position, Read, Term

BOOLEAN = ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not")
NUMPY: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "floordiv": np.floor_divide,
    "mod": np.mod,
    "neg": np.negative,
    "abs": np.abs,
    "maximum": np.maximum,
    "minimum": np.minimum,
    **{name: getattr(np, f"logical_{name}") for name in ("and", "or", "xor", "not")},
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "where": np.where,
    "div": np.divide,
    "floor": np.floor,
}


def number(value: Any, dtype: torch.dtype = torch.int64) -> Number:
    return Number(dtype=dtype, value=value)


def apply(op: str, *args: Term | float, dtype: torch.dtype | None = None) -> Apply:
    """The operation; plain numbers take the dtype of the first operand that is a term."""
    kind = next(a.dtype for a in args[op == "where" :] if isinstance(a, Term))
    terms = tuple(a if isinstance(a, Term) else number(a, kind) for a in args)
    return Apply(dtype=dtype or (torch.bool if op in BOOLEAN else kind), op=op, args=terms)


def cast(term: Term, dtype: torch.dtype) -> Apply:
    return Apply(dtype=dtype, op="cast", args=(term,))


def index(*axes: Axis, start: Any = 0) -> Index:
    return Index(dtype=torch.int64, position=Position(axes=axes), start=start)


def read(name: str, *axes: Axis, dtype: torch.dtype = torch.bool) -> Read:
    return Read(dtype=dtype, value=name, at=tuple(Position(axes=(axis,)) for axis in axes))


class Site:
    """Axes `b`, `h`, `q` and `k` of a site, one each, and the terms of its indices."""

    def __init__(self, queries: Any, keys: Any, *, batch: Any = 2, heads: Any = 3, past: Any = 0) -> None:
        self.b, self.h, self.q, self.k = Axis("b", batch), Axis("h", heads), Axis("q", queries), Axis("k", keys)
        self.axes: Any = {"batch": (self.b,), "heads": (self.h,), "query": (self.q,), "key": (self.k,)}
        self.query, self.key = index(self.q, start=past), index(self.k)
        self.causal = apply("le", self.key, self.query)
        self.padding = read("padding", self.b, self.k)


def symbols(*hints: int) -> tuple[ShapeEnv, tuple[torch.SymInt, ...]]:
    """Symbolic sizes as those of a graph's inputs, with the environment that would show a guard."""
    environment = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(hints))
    fake = FakeTensorMode(shape_env=environment).from_tensor(torch.empty(hints), symbolic_context=context)
    return environment, tuple(fake.shape)  # type: ignore[arg-type]


def values(term: Term, axes: Any, data: dict[str, np.ndarray] | None = None) -> np.ndarray:
    """The term for every batch, head, query and key, in NumPy; one axis a role, sizes known."""
    order = [axis for role in ("batch", "heads", "query", "key") for axis in axes[role]]
    shape = [axis.size for axis in order]
    at = {
        axis: np.arange(axis.size).reshape([-1 if i == j else 1 for j in range(len(order))])
        for i, axis in enumerate(order)
    }

    def position(of: Position) -> Any:
        total: Any = np.int64(0)
        for axis in of.axes:
            total = total * axis.size + at[axis]
        return total + of.start

    def visit(part: Term) -> Any:
        if isinstance(part, Number):
            return torch.tensor(part.value, dtype=part.dtype).numpy()
        if isinstance(part, Index):
            found = part.start + part.step * position(part.position)
        elif isinstance(part, Read):
            assert data is not None
            found = data[part.value][tuple(map(position, part.at))]
        else:
            assert isinstance(part, Apply)
            args = [visit(argument) for argument in part.args]
            found = args[0] if part.op == "cast" else NUMPY[part.op](*args)
        return np.asarray(found).astype(torch.empty((), dtype=part.dtype).numpy().dtype)

    return np.broadcast_to(visit(term), shape)
