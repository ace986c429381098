"""FlexAttention for a site: the terms of its scores become the operator's graphs, and its mask a block mask.

What is inserted is what Dynamo itself records for `torch.nn.attention.flex_attention`: the operator, a graph for the
scores, a graph for the mask, and the tensors that these read as operands. A mask that depends on no data and on no
symbolic size is evaluated here, once, and its blocks become constants of the module; for any other mask the
graph gets operations that find the blocks, once for all sites that share the mask.

A row without any key is zero in FlexAttention, in its gradients too; eager gives NaN or an average over all keys for
such a row. Whoever inserts has to know that there is none, or to mend it.

The scores stay in float32 from the product to the softmax: a cast of them to half precision is left out.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from omnicomp._torch.autograd import flex
from omnicomp._torch.autograd.attention import without_guards
from omnicomp.analysis.nodes import evaluate, fake_value, insert_call
from omnicomp.passes.attention.flex_blocks import (
    Bounds,
    Unbounded,
    are_contiguous,
    find_blocks,
    grid,
    one_block,
    ordered,
)
from omnicomp.passes.attention.flex_values import Backend, Indices, Values, is_constant
from omnicomp.passes.attention.terms import Axis, Index, Number, Position, Read, Term, leaves

_ATEN: Final[Any] = torch.ops.aten
_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
# Triton's `dot` takes no less than 16, and above 256 the tiles of the kernels outgrow a multiprocessor's memory.
_HEAD_SIZES: Final = range(16, 257)
# A mask with more elements than this is not evaluated while the graph is compiled; of the others, so many at once.
_MOST_ELEMENTS: Final = 1 << 31
_AT_ONCE: Final = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexSpec:
    """An attention as FlexAttention takes it."""

    query: Node  # node of a tensor [B, Hq, Q, D]
    key: Node  # [B, Hk, K, D]; Hk divides Hq, and neighbouring queries' heads share a head of the keys
    value: Node  # [B, Hk, K, Dv]
    scale: float  # factor of the scores
    # What goes into the softmax, where `Scores` stands for scale * query @ key; None if that itself does.
    score: Term | None = None
    keep: Term | None = None  # a bool, whether a query attends to a key; None if every query attends to every key
    batch: tuple[Axis, ...]  # the axes that the first dimension of `query` is made of, most significant first
    heads: tuple[Axis, ...]  # those of the second dimension
    query_axes: tuple[Axis, ...]  # those of the third dimension
    key_axes: tuple[Axis, ...]  # those of the third dimension of `key`
    leaf: Callable[[Any], Node]  # the node that holds the tensor of a `Read`; it precedes the place of insertion
    return_lse: bool = False  # whether the log-sum-exp of the scores is wanted, too
    training: bool = False  # whether gradients may flow
    tf32: bool = False  # whether products in float32 are computed in TF32


def unsupported(spec: FlexSpec, *, dropout: float = 0.0) -> str | None:
    """Why FlexAttention cannot or should not run an attention, in one sentence, or None. Nothing is built.

    Args:
        spec: the attention.
        dropout: probability with which the program drops attention weights.
    """
    query, key, value = (fake_value(node) for node in (spec.query, spec.key, spec.value))
    device = query.device.type
    if dropout:
        return "FlexAttention has no dropout"
    missing = flex.missing_code_generator(device)
    if missing is not None:
        return f"FlexAttention's kernels need {missing}, which this machine does not have"
    if device == "cpu" and (spec.training or spec.return_lse):
        return "FlexAttention on the CPU has neither a backward nor a log-sum-exp"
    if len({query.dtype, key.dtype, value.dtype}) > 1 or query.dtype not in _DTYPES:
        return f"FlexAttention takes one dtype of float16, bfloat16 and float32, not {query.dtype} and {value.dtype}"
    if not (query.dim() == key.dim() == value.dim() == 4):
        return "FlexAttention takes queries, keys and values with four dimensions"
    fixed = [query.shape[1], key.shape[1], query.shape[3], value.shape[3]]
    if not all(isinstance(size, int) for size in fixed):
        return f"FlexAttention needs numbers of heads and head sizes that are constants, not {fixed}"
    if query.shape[1] % key.shape[1]:
        return f"{query.shape[1]} heads of queries can't share {key.shape[1]} heads of keys"
    if device == "cuda" and not (query.shape[3] in _HEAD_SIZES and value.shape[3] in _HEAD_SIZES):
        return f"FlexAttention's CUDA kernels take head sizes of {_HEAD_SIZES[0]} to {_HEAD_SIZES[-1]}"
    if isinstance(key.shape[2], int) and key.shape[2] < flex.BLOCK_SIZE:
        return f"FlexAttention takes blocks of {flex.BLOCK_SIZE} keys, and {key.shape[2]} do not fill one"
    return next((why for term in (spec.score, spec.keep) if term is not None if (why := _unsayable(term))), None)


def _unsayable(term: Term) -> str | None:
    """Why a term can't be said in a graph that FlexAttention calls."""
    for leaf in leaves(term):
        values = (leaf.value,) if isinstance(leaf, Number) else ()
        values = (leaf.start, leaf.step) if isinstance(leaf, Index) else values
        if any(isinstance(value, torch.SymFloat | torch.SymBool) for value in values):
            return "the scores use a symbolic number that is no integer"
    return None


def insert_flex(module: GraphModule, before: Node, spec: FlexSpec, shared: dict[Any, Any]) -> tuple[Node, Node | None]:
    """Insert FlexAttention and what it needs.

    Args:
        module: the module of the graph; it gets the graphs of scores and mask, and the blocks of constant masks.
        before: the node that everything is inserted before.
        spec: the attention.
        shared: kept by the caller from site to site, empty at first: sites of one graph with equal masks share one
            block mask. A leaf that is the same node must be the same tensor with the same contents.

    Returns:
        The output [B, Hq, Q, Dv] in the dtype of the queries, with the layout of the queries; and the log-sum-exp of
        the scores [B, Hq, Q] in float32 (without meaning in a row without keys), or None.

    Raises:
        ValueError: a term has an axis that is none of the spec's, or the mask depends on the scores.
        NotImplementedError: a term can't be said in the graphs that FlexAttention calls.
    """
    query, key, value = (fake_value(node) for node in (spec.query, spec.key, spec.value))
    site = _Site(module, before, spec, shared)
    with (
        torch.set_grad_enabled(spec.training),
        torch.autocast(query.device.type, enabled=False),
        without_guards(query),
    ):
        score_mod, score_reads = site.modifier(spec.score, scores=True)
        mask_mod, mask_reads = site.modifier(spec.keep, scores=False)
        lengths, blocks, contiguous, size = site.blocks()
        mask = flex.block_mask_tuple(lengths, blocks, size, mask_mod)
        options = flex.kernel_options(query, key, value, return_lse=spec.return_lse, training=spec.training)
        reads = bool(score_reads or mask_reads)
        tile = flex.tile_options(query, value, site.bytes_of_elements(), reads=reads, tf32=spec.tf32)
        options |= {"BLOCKS_ARE_CONTIGUOUS": contiguous, **tile}
        arguments = (spec.query, spec.key, spec.value, score_mod, mask, spec.scale, options, score_reads, mask_reads)
        with before.graph.inserting_before(before):
            node = before.graph.call_function(flex.FLEX, arguments)
        _describe(node, before)
        operands = [query, key, value, *map(fake_value, score_reads)]
        node.meta["example_value"] = flex.fake_outputs(
            query.fake_mode,
            map_arg(arguments, site.fake),
            requires_grad=spec.training and any(isinstance(o, torch.Tensor) and o.requires_grad for o in operands),
        )
        out = insert_call(before, operator.getitem, (node, 0))
        if not spec.return_lse:
            return out, None
        binary = insert_call(before, operator.getitem, (node, 1))
        return out, insert_call(before, operator.mul, (binary, math.log(2)))


class _Site:
    """What is built for one attention."""

    def __init__(self, module: GraphModule, before: Node, spec: FlexSpec, shared: dict[Any, Any]) -> None:
        self._module, self._before, self._spec = module, before, spec
        self._indices = Indices(spec.batch, spec.heads, spec.query_axes, spec.key_axes)
        self._names: dict[Any, int] = shared.setdefault("names", {})
        self._kept: dict[Any, Any] = shared.setdefault("kept", {})
        query, key = fake_value(spec.query), fake_value(spec.key)
        self._fake_mode, self._device, self._dtype = query.fake_mode, query.device, query.dtype
        self._sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])

    def fake(self, node: Node) -> Any:
        """The fake value of an operand; a graph that the operator calls stands for itself."""
        value = getattr(self._module, str(node.target)) if node.op == "get_attr" else None
        return value if isinstance(value, GraphModule) else fake_value(node)

    def modifier(self, term: Term | None, *, scores: bool) -> tuple[Node, tuple[Node, ...]]:
        """The node of the graph that the operator calls for each score, and the operands that this graph reads."""
        name, operands = self._once((self._module, scores, self._name(term)), lambda: self._modifier(term, scores))
        with self._before.graph.inserting_before(self._before):
            node = self._before.graph.create_node("get_attr", name)
        _describe(node, self._before)
        return node, operands

    def blocks(self) -> tuple[tuple[Any, Any], list[Node | None], bool, int]:
        """Lengths of queries and keys, the block mask, whether the blocks of a row are neighbours, and their size."""
        keep, lengths = self._spec.keep, self._sizes[2:]
        if keep is None:
            make = functools.partial(self._constants, lambda: one_block(self._device))
            blocks, contiguous = self._once(("blocks", None, self._device), make)
            return (1, 1), list(blocks), contiguous, flex.ONE_BLOCK
        key = ("blocks", self._name(keep), *map(str, self._sizes), self._device, self._spec.training)
        blocks, contiguous = self._once(key, lambda: self._find_blocks(keep))
        return (self._number(lengths[0]), self._number(lengths[1])), list(blocks), contiguous, flex.BLOCK_SIZE

    def bytes_of_elements(self) -> int:
        """What the kernel loads for each score, besides queries, keys and values."""
        reads = {
            self._name(leaf): leaf.dtype.itemsize
            for term in (self._spec.score, self._spec.keep)
            for leaf in (leaves(term) if term is not None else ())
            if isinstance(leaf, Read) and self._indices.roles(leaf) >= {2, 3}
        }
        return sum(reads.values())

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made for an earlier site if its nodes precede this one, else what `make` gives."""
        nodes: list[Node] = []
        map_arg(self._kept.get(key, ()), nodes.append)
        if key not in self._kept or not all(n.graph is self._before.graph and n < self._before for n in nodes):
            self._kept[key] = make()
        return self._kept[key]

    def _name(self, term: Term | None) -> int:
        return -1 if term is None else self._indices.name(term, self._spec.leaf, self._names)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        with self._fake_mode:  # also where no operand is fake
            return insert_call(self._before, function, args, kwargs)

    def _number(self, value: Any) -> Any:
        return flex.number_as_node(value, self._symbol, self._call)

    def _symbol(self, symbol: Any) -> Node:
        """The node that holds a symbol, or the size of a tensor that does."""
        for node in self._before.graph.nodes:
            if node is self._before:
                break
            fake = fake_value(node)
            if flex.is_symbol(fake, symbol):
                return node
            for dim, size in enumerate(fake.shape if isinstance(fake, torch.Tensor) else ()):
                if flex.is_symbol(size, symbol):
                    return self._call(_ATEN.sym_size.int, node, dim)
        raise NotImplementedError(f"no tensor of the graph has the size {symbol}")

    def _operand(self, read: Read) -> tuple[Node, tuple[Position, ...]]:
        """The tensor of a read without the dimensions at which it reads one place, and the positions along the rest."""
        node, positions = self._spec.leaf(read.value), list(read.at)
        for dim in reversed(range(len(positions))):
            if not self._indices.runs(positions[dim]):
                node = self._call(_ATEN.select.int, node, dim, self._number(positions.pop(dim).start))
        return node, tuple(positions)

    def _modifier(self, term: Term | None, scores: bool) -> tuple[str, tuple[Node, ...]]:
        graph = _Modifier(self._fake_mode, self._device, self._dtype if scores else None)
        operands: list[Node] = []
        lifted: dict[Any, Node] = {}
        elements: dict[int, Node] = {}

        def lift(key: Any, node: Callable[[], Node]) -> Node:
            if key not in lifted:
                operands.append(node())
                lifted[key] = graph.operand(fake_value(operands[-1]))
            return lifted[key]

        def read(leaf: Read, position: Callable[[Position], Any]) -> Any:
            name = self._name(leaf)
            if name not in elements:  # FlexAttention's backward takes each operand to be read once
                elements[name] = first_read(leaf, name, position)
            return elements[name]

        def first_read(leaf: Read, name: int, position: Callable[[Position], Any]) -> Node:
            tensor, positions = self._operand(leaf)
            fake, roles = fake_value(tensor), self._indices.roles(leaf)
            if fake.requires_grad and not scores:
                tensor = self._call(_ATEN.detach.default, tensor)
            elif fake.requires_grad and roles.isdisjoint((2, 3)):
                # The gradient is added up by atomic additions; with a row for each query, fewer meet in one place.
                tensor = self._call(
                    _ATEN.expand.default, tensor, [self._number(size) for size in (self._sizes[2], *fake.shape)]
                )
                positions = (Position(self._spec.query_axes), *positions)
            small = fake.dtype.itemsize == 1 and not fake.dtype.is_floating_point and not roles >= {2, 3}
            if positions and small and self._device.type == "cuda":
                # A kernel's loop prefetches what is loaded four bytes at a time, and waits for each single byte.
                made = self._once(("wide", tensor), lambda: self._call(_ATEN.to.dtype, tensor, torch.int32))
                wide = graph.read(lift(name, lambda: made), tuple(position(at) for at in positions))
                return graph.call(_ATEN.to.dtype, wide, fake.dtype)
            operand = lift(name, lambda: tensor)
            return graph.read(operand, tuple(position(at) for at in positions)) if positions else operand

        def number(value: Any) -> Any:
            return flex.number_as_node(value, lambda s: lift(s, lambda: self._symbol(s)), graph.call)

        tanh = flex.tanh_of_scores(self._device, self._dtype)
        backend = Backend(call=graph.call, index=graph.index, read=read, number=number, score=graph.score, tanh=tanh)
        result: Any = graph.score if scores else True
        if term is not None:
            result = number(Values(self._indices, backend)(term))
        name = _free_name(self._module, "flex_score" if scores else "flex_keep")
        self._module.add_module(name, graph.finish(result, torch.float32 if scores else torch.bool))
        return name, tuple(operands)

    def _find_blocks(self, keep: Term) -> tuple[tuple[Node | None, ...], bool]:
        roles = self._indices.roles(keep)
        sizes = (*(size if role in roles else 1 for role, size in enumerate(self._sizes[:2])), *self._sizes[2:])
        rows, columns = ((size + flex.BLOCK_SIZE - 1) // flex.BLOCK_SIZE for size in sizes[2:])
        shape, training = (*sizes[:2], rows, columns), self._spec.training
        if (
            not is_constant(keep)
            or any(isinstance(n, torch.SymInt) for n in sizes)
            or math.prod(sizes) > _MOST_ELEMENTS
        ):
            some, full = self._some_and_full(keep, roles, sizes, (0, rows), columns)
            return ordered(self._call, some, full, shape, self._device, self._number, training=training), False
        step = max(1, _AT_ONCE // (sizes[0] * sizes[1] * flex.BLOCK_SIZE * sizes[3])) if 2 in roles else rows
        spans = [(start, min(start + step, rows)) for start in range(0, rows, step)]
        with flex.on_real_tensors():
            parts = [self._some_and_full(keep, roles, sizes, span, columns, _run) for span in spans]
            some, full = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
        return self._constants(lambda: ordered(_run, some, full, shape, self._device, _as_it_is, training=training))

    def _some_and_full(
        self,
        keep: Term,
        roles: set[int],
        sizes: tuple[Any, ...],
        rows: tuple[Any, Any],
        columns: Any,
        call: Callable[..., Any] | None = None,
    ) -> tuple[Any, Any]:
        """Which blocks have an element that is kept, and which no other: nodes, or the results of `call`.

        Those of nodes are bounds, where the mask has any that cost less than its elements.
        """
        number = self._number if call is None else _as_it_is
        call = call or self._call
        index, valid = grid(call, sizes, roles, rows, columns, self._device, number)

        def read(leaf: Read, position: Callable[[Position], Any]) -> Any:
            tensor, positions = self._operand(leaf)
            if fake_value(tensor).requires_grad:
                tensor = call(_ATEN.detach.default, tensor)
            return call(_ATEN.index.Tensor, tensor, [position(at) for at in positions]) if positions else tensor

        values = Values(self._indices, Backend(call=call, index=index, read=read, number=number))
        if number is not _as_it_is and roles >= {2, 3}:
            bounds = Bounds(call=call, indices=self._indices, values=values, number=number, device=self._device)
            with contextlib.suppress(Unbounded):
                return bounds.blocks(keep, valid)
        kept = number(values(keep))
        if not isinstance(kept, Node | torch.Tensor):
            kept = call(torch.full, (1, 1, 1, 1, 1, 1), bool(kept), device=self._device)
        return find_blocks(call, kept, valid)

    def _constants(self, make: Callable[[], tuple[torch.Tensor | None, ...]]) -> tuple[tuple[Node | None, ...], bool]:
        """The tensors of a block mask as one attribute of the module: nodes of their values, and `are_contiguous`.

        One, because a compiled graph copies each constant. It is no buffer: Dynamo knows where each of a graph's
        buffers comes from, and AOTAutograd asks for it. Lifting is how a constant enters a trace.
        """
        # Each part begins at a multiple of 16 bytes, as Triton's loads like it.
        with flex.on_real_tensors():
            tensors = make()
            present = list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())
            if self._device.type == "cpu" and all(tensor.unique().numel() == 1 for tensor in present):
                # Inductor would fold views of a constant away, whose buffers its C++ template then misses.
                filled = {id(t): (list(t.shape), int(t.flatten()[0])) for t in present}
                made = {key: self._call(torch.full, *what, dtype=torch.int32) for key, what in filled.items()}
                return tuple(None if t is None else made[id(t)] for t in tensors), are_contiguous(tensors)
            padded = [F.pad(tensor.flatten(), (0, -tensor.numel() % 4)) for tensor in present]
            packed, contiguous = torch.cat(padded), are_contiguous(tensors)
        name = _free_name(self._module, "flex_blocks")
        setattr(self._module, name, packed)
        with self._before.graph.inserting_before(self._before):
            constant = self._before.graph.create_node("get_attr", name)
        _describe(constant, self._before)
        constant.meta["example_value"] = flex.fake_constant(self._fake_mode, packed)
        lifted = self._call(_ATEN.lift_fresh_copy.default, constant)
        starts = itertools.accumulate((part.numel() for part in padded), initial=0)
        place = {id(tensor): (tensor, start) for tensor, start in zip(present, starts, strict=False)}
        nodes = {
            key: self._call(_ATEN.as_strided.default, lifted, list(tensor.shape), list(tensor.stride()), start)
            for key, (tensor, start) in place.items()
        }
        return tuple(None if tensor is None else nodes[id(tensor)] for tensor in tensors), contiguous


class _Modifier:
    """A graph that FlexAttention calls: on a score and its four indices, or on the indices alone, and on operands.

    Attributes:
        index: the nodes of batch, head, query and key index, int32 without dimensions.
        score: the node of the score in float32, or None.
    """

    def __init__(self, mode: Any, device: torch.device, scores: torch.dtype | None) -> None:
        """Args: fake mode and device of the graph's values, and the dtype of the scores or None."""
        self._graph, self._mode = Graph(), mode
        with mode:
            number = torch.zeros((), dtype=torch.int32, device=device)
            first = torch.zeros((), dtype=scores, device=device) if scores else None
        score = None if first is None else self._placeholder("score", first)
        self.index = tuple(self._placeholder(name, number) for name in "bhqk")
        self._last = self.index[-1]
        # A kernel has the scores in float32, whatever dtype it says they have.
        half = scores is not None and scores != torch.float32
        self.score = self.call(_ATEN.to.dtype, score, torch.float32) if half else score

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A call, with its fake value."""
        node = self._graph.call_function(function, args, kwargs)
        node.meta["example_value"] = evaluate(function, args, kwargs)
        return node

    def operand(self, fake: Any) -> Node:
        """One more parameter of the graph."""
        with self._graph.inserting_after(self._last):
            self._last = self._placeholder(f"operand_{len(self._graph.find_nodes(op='placeholder'))}", fake)
        return self._last

    def read(self, tensor: Node, at: tuple[Node, ...]) -> Node:
        """One element of a tensor."""
        with flex.reads_by_index():
            return self.call(operator.getitem, tensor, at)

    def finish(self, result: Any, dtype: torch.dtype) -> GraphModule:
        """The module of the graph that returns a value, of no dimensions and that dtype."""
        if not isinstance(result, Node):
            result = self.call(torch.full_like, self.index[0], result, dtype=dtype)
        self._graph.output(result)
        return GraphModule({}, self._graph)

    def _placeholder(self, name: str, fake: Any) -> Node:
        node = self._graph.placeholder(name)
        node.meta["example_value"] = fake
        return node


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _as_it_is(value: Any) -> Any:
    return value


def _free_name(module: torch.nn.Module, prefix: str) -> str:
    return next(name for n in itertools.count() if not hasattr(module, name := f"{prefix}_{n}"))


def _describe(node: Node, like: Node) -> None:
    """Give a node the source and module of another."""
    node.meta.update({key: like.meta[key] for key in ("stack_trace", "nn_module_stack", "custom") if key in like.meta})
