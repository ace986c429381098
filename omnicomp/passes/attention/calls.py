"""Calls of `scaled_dot_product_attention`, read as the attention that they are.

What a call gets is read like what a program spells out: its mask as a function of batch, head, query and key, its
queries, keys and values behind copies and repeated heads. Its meaning is that of the call, not of a softmax: a row in
which `-inf` hides every key is zero.
"""

import dataclasses
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.fx import Graph, Node

from omnicomp._torch.autograd.attention import known_equal
from omnicomp.passes.attention.operands import peel
from omnicomp.passes.attention.reader import At, Reader, axes_of
from omnicomp.passes.attention.site import Add, Call, Fill, MatchEnded, Narrow, Operand, Scale, Site, Step
from omnicomp.passes.attention.terms import Apply, Axis, Index, Number, Position, Scores
from omnicomp.passes.attention.trace import CALL, Op, Trace, Value
from omnicomp.passes.attention.views import NotAView, broadcast, split

_PARAMETERS: Final = {
    "query": inspect.Parameter.empty,
    "key": inspect.Parameter.empty,
    "value": inspect.Parameter.empty,
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}
_SIGNATURE: Final = inspect.Signature(
    [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=d) for n, d in _PARAMETERS.items()]
)


def calls(trace: Trace, graph: Graph) -> Iterator[Op]:
    """The calls that a graph makes, in their order."""
    return (op for op in trace.ops if op.name == CALL and op.node.graph is graph)


def read_call(op: Op, trace: Trace, reader: Reader) -> Site:
    """Read a call.

    Raises:
        MatchEnded: it has an argument that is not understood; the call stays what it is.
    """
    given, nodes = (_bound(args, kwargs) for args, kwargs in ((op.args, op.kwargs), (op.node.args, op.node.kwargs)))
    mask, out = given["attn_mask"], op.outputs[0]
    _check(op, given, out)
    tensors, held = ([of[name] for name in ("query", "key", "value")] for of in (given, nodes))
    read = read_operands(op, tensors, held, out, trace, reader, grouped=given["enable_gqa"])
    queries, batch, scale, features = read.at[-2], read.at[:-2], read.scale, read.size
    # A default that depends on a symbolic size is left to the call.
    by_default = given["scale"] is None and not isinstance(features, int)
    if by_default and (scale != 1 or read.factors):
        raise _ended(op, "the head size is symbolic, and the queries or keys are scaled")
    if not by_default:
        scale *= 1 / math.sqrt(features) if given["scale"] is None else given["scale"]
    told = None
    if mask is not None:
        told = Operand(mask, nodes["attn_mask"], broadcast(mask, (*batch, queries, read.key)))
    return Site(
        softmax=op,
        output=op.node,
        output_at=read.at,
        query=read.operands[0],
        key=read.operands[1],
        value=read.operands[2],
        batch=tuple(axis for position in batch for axis in position.axes),
        queries=queries.axes,
        keys=read.key.axes,
        features=read.feature.axes,
        value_features=read.at[-1].axes,
        score=Scores(dtype=read.dtype),
        dtype=read.dtype,
        product=op.node,
        scale=scale,
        factors=read.factors,
        steps=list[Step | Narrow](_steps(told, reader, queries, read.key, is_causal=given["is_causal"])),
        dropout=float(given["dropout_p"]),
        undefined=0.0,
        call=Call(operands=(held[0], held[1], held[2]), mask=told, arguments=_options(given), default_scale=by_default),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """Queries, keys and values of a call, and the axes that address them."""

    operands: tuple[Operand, Operand, Operand]  # what is behind them
    at: At  # the position along each dimension of the output
    key: Position  # the key index
    feature: Position  # the index of what is multiplied
    scale: float  # product of the constant factors that were taken out of queries and keys
    factors: list[Scale]  # other such factors
    size: Any  # the head size
    dtype: torch.dtype  # of the output


def read_operands(
    op: Op, tensors: Sequence[Value], nodes: Sequence[Node], out: Value, trace: Trace, reader: Reader, *, grouped: bool
) -> Operands:
    """Read what is behind queries, keys and values.

    Args:
        op: the call.
        tensors: queries, keys and values that it is given.
        nodes: the nodes of them.
        out: its output.
        trace: the trace of the graph.
        reader: reads it.
        grouped: whether several heads of queries may share one of keys and values.

    Raises:
        MatchEnded: their shapes are not understood.
    """
    query, key, value = tensors
    at = axes_of(out)
    batch, queries = at[:-2], at[-2]
    features = Axis("d", query.fake.shape[-1])
    keys = Position() if known_equal(key.fake.shape[-2], 1) else Position((Axis("k", key.fake.shape[-2]),))
    try:
        places = (
            (*_broadcast_batch(query, batch), queries, Position((features,))),
            (*_held(key, batch, query, grouped=grouped), keys, Position((features,))),
            (*_held(value, batch, query, grouped=grouped), keys, at[-1]),
        )
    except NotAView as end:
        raise _ended(op, f"its heads can't be addressed by axes: {end}") from end
    dtype = out.fake.dtype
    first, second, third = (
        _operand(Operand(item, node, where), dtype, trace, reader, op.node, scaled=place < 2)
        for place, (item, node, where) in enumerate(zip(tensors, nodes, places, strict=True))
    )
    return Operands(
        operands=(first[0], second[0], third[0]),
        at=at,
        key=keys,
        feature=Position((features,)),
        scale=first[1] * second[1],
        factors=[*first[2], *second[2]],
        size=features.size,
        dtype=dtype,
    )


def _operand(
    given: Operand, dtype: torch.dtype, trace: Trace, reader: Reader, where: Node, *, scaled: bool
) -> tuple[Operand, float, list[Scale]]:
    """What is behind an operand; itself, where that is not held any more (it was written to in place)."""
    try:
        return peel(given.value, given.at, dtype, trace, reader, where, scaled=scaled)
    except MatchEnded:
        return given, 1.0, []


def _bound(args: Any, kwargs: Any) -> dict[str, Any]:
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _options(given: dict[str, Any]) -> dict[str, Any]:
    return {
        name: given[name]
        for name, default in _PARAMETERS.items()
        if name not in ("query", "key", "value", "attn_mask") and given[name] != default
    }


def _check(op: Op, given: dict[str, Any], out: Value) -> None:
    tensors = [given[name] for name in ("query", "key", "value")]
    if given["attn_mask"] is not None:
        if given["is_causal"]:
            raise _ended(op, "a mask is given beside is_causal, which torch refuses")
        tensors.append(given["attn_mask"])
    if not all(isinstance(t, Value) and t.fake.layout is torch.strided and not t.fake.is_nested for t in tensors):
        raise _ended(op, "an argument is no plain tensor")
    rank = out.fake.dim()
    if rank < 2 or any(t.fake.dim() != rank for t in tensors[:3]) or any(t.fake.dim() > rank for t in tensors):
        raise _ended(op, "queries, keys and values have other numbers of dimensions than the output")
    numbers = [given["dropout_p"], 1.0 if given["scale"] is None else given["scale"]]
    if not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers) or not numbers[1]:
        raise _ended(op, "its scale or its dropout is no number that is known")
    if not isinstance(given["is_causal"], bool) or not isinstance(given["enable_gqa"], bool):
        raise _ended(op, "an argument is no bool that is known")
    if not out.fake.dtype.is_floating_point:
        raise _ended(op, "it is not of real numbers")


def _broadcast_batch(value: Value, batch: At) -> At:
    """Where the batch dimensions of an operand are: those of the output, or one for all."""
    sizes = value.fake.shape[:-2]
    return tuple(Position() if known_equal(size, 1) else at for size, at in zip(sizes, batch, strict=True))


def _held(value: Value, batch: At, query: Value, *, grouped: bool) -> At:
    """The same for keys and values, whose heads several of the queries' heads may share."""
    at = _broadcast_batch(value, batch)
    if not grouped or not at or not at[-1].axes:
        return at
    heads: Any = query.fake.shape[-3]
    own: Any = value.fake.shape[-3]
    if known_equal(heads, own):
        return at
    if not isinstance(heads, int) or not isinstance(own, int) or heads % own:
        raise NotAView("numbers of heads")
    high, _ = split(at[-1].axes, heads // own)
    return (*at[:-1], Position(high))


def _steps(
    mask: Operand | None, reader: Reader, queries: Position, keys: Position, *, is_causal: bool
) -> Iterator[Step]:
    if is_causal:
        query, key = (Index(dtype=torch.int64, position=p) for p in (queries, keys))
        yield _hiding(Apply(dtype=torch.bool, op="gt", args=(key, query)))
    if mask is None:
        return
    term = reader.read(mask.value, mask.at)
    if term.dtype == torch.bool:
        yield _hiding(Apply(dtype=torch.bool, op="not", args=(term,)))
    else:
        yield Add(term)


def _hiding(condition: Apply) -> Fill:
    return Fill(condition, Number(dtype=torch.float32, value=-math.inf))


def _ended(op: Op, sentence: str) -> MatchEnded:
    return MatchEnded(op.node, sentence, needed="queries, keys, values and a mask as torch documents them")
