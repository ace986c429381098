"""Calls of FlexAttention, read as the attention that they are.

The function of indices that makes the mask is read for all indices at once. The blocks that a call is told to visit
count as well: they are followed back to the mask that they were found in, which has to be the same.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.fx import Graph, GraphModule, Node

from omnicomp._torch.autograd.attention import known_equal
from omnicomp.analysis.nodes import fake_value
from omnicomp.passes.attention.calls import read_operands
from omnicomp.passes.attention.masking import Masking, read_steps
from omnicomp.passes.attention.nodes import is_pure
from omnicomp.passes.attention.reader import Reader, axes_of, uniform
from omnicomp.passes.attention.site import Call, Fill, MatchEnded, Site, Step, Visited
from omnicomp.passes.attention.structure import term_key
from omnicomp.passes.attention.terms import Apply, Axis, Number, Position, Scores, Term, flat
from omnicomp.passes.attention.trace import FLEX_CALL, Op, Trace, Value
from omnicomp.passes.attention.views import VIEWS, NotAView, broadcast, source

_Groups = tuple[tuple[Axis, ...], ...]
_ROLES: Final = ("batch", "heads", "query", "key")
_COPIES: Final = ("_to_copy", "to", "clone", "alias", "contiguous")


def flex_calls(trace: Trace, graph: Graph) -> Iterator[Op]:
    """The calls that a graph makes, in their order."""
    return (op for op in trace.ops if op.name == FLEX_CALL and op.node.graph is graph)


def read_flex_call(op: Op, module: GraphModule, trace: Trace, reader: Reader) -> Site:
    """Read a call.

    Raises:
        MatchEnded: it is told more than which keys to visit; the call stays what it is.
    """
    output = _output(op)
    _check_plain(op, module)
    query, key, value, mask, *blocks = op.args
    scale = op.node.args[5]
    if not isinstance(scale, int | float) or not math.isfinite(scale) or not scale:
        raise _ended(op, "its scale is no number that is known")
    nodes: Any = op.node.args[:3]
    read = read_operands(op, (query, key, value), nodes, op.outputs[0], trace, reader, grouped=True)
    if mask is None:
        raise _ended(op, "its mask is not read")
    queries, keys = read.at[-2], read.key
    term = reader.read(mask, broadcast(mask, (*read.at[:-2], queries, keys)))
    steps = [_hiding(term)]
    batch = tuple(axis for position in read.at[:-2] for axis in position.axes)
    groups = (read.at[0].axes, read.at[1].axes, queries.axes, keys.axes)
    masking = read_steps(steps, groups, reader)
    visited = None if _visits(term, groups, masking, blocks, reader) else _visited(op, masking)
    return Site(
        softmax=op,
        output=output,
        output_at=read.at,
        query=read.operands[0],
        key=read.operands[1],
        value=read.operands[2],
        batch=batch,
        queries=queries.axes,
        keys=keys.axes,
        features=read.feature.axes,
        value_features=read.at[-1].axes,
        score=Scores(dtype=read.dtype),
        dtype=read.dtype,
        product=op.node,
        scale=read.scale * scale,
        factors=read.factors,
        steps=[] if masking.is_full else [*steps],
        undefined=0.0,
        chain={op.node},
        call=Call(operands=nodes, mask=None, arguments={}, flex=True, visited=visited),
    )


def _output(op: Op) -> Node:
    """The one node that holds the output.

    Raises:
        MatchEnded: something else of the call is used.
    """
    users = [user for user in op.node.users if not _is_dead(user)]
    if len(users) != 1 or len(users[0].args) != 2 or users[0].args[1] != 0:
        raise _ended(op, "its log-sum-exp or maximum is used")
    return users[0]


def _is_dead(node: Node) -> bool:
    """Whether nothing comes of a node; what it does is no effect of its own."""
    return node.op != "output" and is_pure(node) and all(map(_is_dead, node.users))


def _check_plain(op: Op, module: GraphModule) -> None:
    score, options = op.node.args[3], op.node.args[6]
    graph = getattr(module, str(score.target), None) if isinstance(score, Node) else None
    first = next(iter(graph.graph.find_nodes(op="placeholder")), None) if isinstance(graph, GraphModule) else None
    result = graph.graph.output_node().args[0] if isinstance(graph, GraphModule) else None
    result = result[0] if isinstance(result, list | tuple) and len(result) == 1 else result
    if first is None or result is not first:
        raise _ended(op, "its scores go through a function")
    if isinstance(options, dict) and options.get("BACKEND", "AUTO") != "AUTO":
        raise _ended(op, f"it asks for the kernel {options['BACKEND']}")
    if any(not isinstance(node, Node) or fake_value(node).dim() != 4 for node in op.node.args[:3]):
        raise _ended(op, "an argument is no plain tensor")


def _visits(term: Term, groups: _Groups, masking: Masking, blocks: Sequence[Any], reader: Reader) -> bool:
    """Whether the blocks are those of a mask that is known to be the same."""
    numbers, indices, full_numbers, full_indices = blocks[2:6]
    if full_numbers is None and uniform(numbers) == 1 and uniform(indices) == 0:
        large = (numbers.fake.shape[-1], indices.fake.shape[-1])
        return all(known_equal(size, 1) for size in large)  # one block, of all queries and keys
    partial = _blocks_of(numbers, indices)
    if partial is None:
        return False
    sums, size, kind = partial
    if full_numbers is None:
        found = sums if kind == "some" else None
    else:
        full = _blocks_of(full_numbers, full_indices)
        found = sums if kind == "part" and full is not None and full[2] == "all" and full[0] is sums else None
    if found is None:
        return False
    mask = _mask_of_sums(found, size, (blocks[-2], blocks[-1]))
    if mask is None or mask.fake.dim() != 4:
        return False
    at = axes_of(mask)
    own = (at[0].axes, at[1].axes, at[2].axes, at[3].axes)
    made = reader.read(mask, at)
    if masking.is_full or masking.is_causal:
        other = read_steps([_hiding(made)], own, reader)
        return other.is_full if masking.is_full else other.is_causal
    # Indices that the mask does not depend on may be left out of it.
    if any(len(one) > len(other) for one, other in zip(own, groups, strict=True)):
        return False
    return _key(reader.expand(made), own, groups) == _key(reader.expand(term), groups, groups)


def _visited(op: Op, masking: Masking) -> Visited:
    """The blocks, for a look at them when the call is made."""
    blocks: Any = op.node.args[4]
    numbers, indices, full_numbers, full_indices = blocks[2:6]
    rows, columns = blocks[-3:-1]
    if not isinstance(rows, int) or not isinstance(columns, int):
        raise _ended(op, f"the blocks that it visits are not known to be those of its mask ({masking.name})")
    full = None if full_numbers is None else (full_numbers, full_indices)
    return Visited(partial=(numbers, indices), full=full, sizes=(rows, columns))


def _key(term: Term, groups: _Groups, of: _Groups) -> Any:
    """Equal for two masks that say the same; `of` has the sizes that the indices run to."""
    named = {role: flat(own or other) for role, own, other in zip(_ROLES, groups, of, strict=True)}
    return term_key(term, **named)


def _blocks_of(numbers: Value, indices: Value) -> tuple[Value, Any, str] | None:
    """The sums over blocks that a list of blocks was made of, the elements of a block, and which blocks it has."""
    count, order = _behind(numbers).op, _behind(indices)
    if count is None or count.name != "sum" or [int(d) for d in count.argument("dim", [])] != [-1]:
        return None
    if order.op is None or order.op.name != "sort" or order.index != 1 or order.op.argument("descending") is not True:
        return None
    chosen = _behind(count.args[0])
    if _behind(order.op.args[0]) is not chosen or chosen.op is None:
        return None
    if chosen.op.name == "eq":
        sums, size = chosen.op.args
        return sums, size, "all"
    if chosen.op.name == "gt" and chosen.op.args[1] == 0:
        return chosen.op.args[0], None, "some"
    if chosen.op.name not in ("bitwise_and", "__and__", "logical_and"):
        return None
    some, few = (argument.op for argument in chosen.op.args[:2])
    if some is None or few is None or (some.name, few.name) != ("gt", "lt") or some.args[1] != 0:
        return None
    return (some.args[0], few.args[1], "part") if some.args[0] is few.args[0] else None


def _mask_of_sums(sums: Value, size: Any, block: tuple[Any, Any]) -> Value | None:
    """The mask whose blocks were summed."""
    op = sums.op
    if op is None or op.name != "sum" or sorted(int(d) % 6 for d in op.argument("dim", [])) != [4, 5]:
        return None
    value = op.args[0]
    at = axes_of(value)
    if value.fake.dim() != 6 or not all(map(known_equal, value.fake.shape[-2:], block)):
        return None
    if size is not None and not known_equal(size, block[0] * block[1]):
        return None
    expected = (at[0], at[1], Position((*at[2].axes, *at[4].axes)), Position((*at[3].axes, *at[5].axes)))
    try:
        while value.fake.dim() != 4:
            if value.op is None or value.op.name not in VIEWS:
                return None
            value, at = source(value.op, value.index, at)
    except NotAView:
        return None
    if any(a.flat() != b.flat() or not known_equal(a.start, 0) for a, b in zip(at, expected, strict=True)):
        return None
    value = _behind(value)
    if value.op is not None and value.op.name == "constant_pad_nd":
        pads, filler = value.op.argument("pad"), value.op.argument("value", 0)
        if any(pads[::2]) or len(pads) > 4 or filler:
            return None
        value = value.op.args[0]
    return value


def _behind(value: Value) -> Value:
    while value.op is not None and value.op.name in _COPIES:
        value = value.op.args[0]
    return value


def _hiding(keep: Term) -> Step:
    condition = Apply(dtype=torch.bool, op="not", args=(keep,))
    return Fill(condition, Number(dtype=torch.float32, value=-math.inf))


def _ended(op: Op, sentence: str) -> MatchEnded:
    return MatchEnded(op.node, sentence, needed="a mask of indices that is full or causal, and plain scores")
