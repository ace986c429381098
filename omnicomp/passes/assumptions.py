"""What is assumed of a graph's inputs where it can't be proved: the check, and whether it pays.

A mask that is an input may be full, causal, or anything else. A pass that wants to rewrite as if it were one of these
asks `worth` whether that pays, makes an `Assumption`, and hands it to its context. The backend then makes variants, and
checks at each call which one is right (`omnicomp.backend.variants`).
"""

import dataclasses
import functools
import json
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from omnicomp import records
from omnicomp._torch.dtypes import storage_key, was_written
from omnicomp._torch.dynamo.late_compile import is_subclass
from omnicomp._torch.inductor.graph_text import TextGraph, to_source
from omnicomp._torch.symbols import free_unbacked_symbols
from omnicomp._torch.targets import base_name, is_torchs
from omnicomp.analysis.costs import size_of
from omnicomp.analysis.nodes import fake_value, op_name, source_line, submodules
from omnicomp.passes.mask_classes import MaskClass
from omnicomp.timeline import Reason

_BY: Final = "speculation"

# Every element of the result is an element of the operand, so that the operand's elements decide.
_SAME_ELEMENTS: Final = frozenset(
    "view reshape flatten unflatten squeeze unsqueeze transpose swapaxes permute movedim t expand expand_as "
    "broadcast_to contiguous clone detach alias".split()
)
# Free, or as cheap as reading the operands once; deterministic; writes to nothing. Sizes of results depend on no data.
_CHEAP: Final = _SAME_ELEMENTS | frozenset(
    "getitem select slice narrow unbind chunk split size dim numel sym_size sym_numel getattr "
    "to type type_as bool int long short byte float double half bfloat16 _to_copy "
    "eq ne lt le gt ge and_ or_ xor not_ inv invert __and__ __or__ __xor__ __invert__ __eq__ __ne__ __lt__ __le__ "
    "__gt__ __ge__ __rand__ __ror__ logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor "
    "bitwise_not add sub rsub mul div truediv floordiv floor_divide mod remainder neg abs minimum maximum clamp "
    "sym_min sym_max sym_not where masked_fill index index_select gather isin isnan isinf isfinite any all amin amax "
    "min max sum cumsum arange zeros ones full tensor zeros_like ones_like full_like new_zeros new_ones new_full "
    "scalar_tensor tril triu cat concat stack pad flip".split()
)
_ATTRIBUTES: Final = frozenset("shape device dtype ndim T mT H mH".split())
_IN_PLACE: Final = frozenset(
    "setitem iadd isub imul imatmul itruediv ifloordiv imod ipow ilshift irshift iand ior ixor iconcat delitem".split()
)
# Higher-order operators whose regions are looked into, and which write to nothing themselves: operands in order of the
# region's placeholders, behind the region.
_TRANSPARENT: Final = frozenset("tag_activation_checkpoint wrap_activation_checkpoint wrap".split())
# Others that write to nothing: Dynamo refuses regions of theirs that would.
_WRITES_NOTHING: Final = _TRANSPARENT | frozenset(
    "cond while_loop scan associative_scan map_impl flex_attention".split()
)

_MOST_NODES: Final = 128
_MOST_BYTES: Final = 1 << 28


@records.dataclass(frozen=True, kw_only=True, eq=False)
class Assumption:
    """Something that a variant of a graph takes for granted, and how to see whether it is so."""

    # A graph that neither writes nor draws random numbers. It returns one bool tensor of no dimensions, or the
    # `MaskParts` of a mask, if the assumption is about one.
    check: GraphModule | TextGraph
    inputs: tuple[str, ...]  # names of the placeholders of the Dynamo graph that the check takes, in order
    sentence: str  # the assumption, for example "the padding mask is full"
    saves: str = ""  # what it saves, for people
    source: str = ""  # `file:line` of the value that it is about
    bytes: int = 0  # what the check reads and writes, for the sizes seen at compile time
    input_bytes: int = 0  # how much of that are the inputs
    accepts: frozenset[str] = frozenset()  # kinds of `MaskClass` that a variant can be made for, if it is about a mask
    holds: MaskClass | None = None  # the class that is assumed of the mask; None if it is no mask

    def as_text(self) -> "Assumption":
        """The same assumption, in a form that pickles.

        Raises:
            ValueError: the check holds something that can't travel as text.
        """
        check = self.check
        return dataclasses.replace(self, check=TextGraph(to_source(check)) if isinstance(check, GraphModule) else check)

    @property
    def key(self) -> tuple[tuple[str, ...], str]:
        """Equal for checks that compute the same of the same inputs."""
        return self.inputs, self.check.code

    @functools.cached_property
    def shared_key(self) -> Hashable:
        """Equal for checks of any graphs that compute the same of their inputs and constants."""
        written = self.check.data["constants"] if isinstance(self.check, TextGraph) else {}
        return self.check.code, bool(self.accepts), json.dumps(written)

    @functools.cached_property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the check holds itself; whoever remembers its verdict has to look at them, too."""
        check = self.check
        if isinstance(check, TextGraph):  # copies, which nobody writes to
            return ()
        return tuple(getattr(check, str(node.target)) for node in check.graph.find_nodes(op="get_attr"))


def is_cheap(node: Node) -> bool:
    """Whether a node is one by which masks, positions and views are made, and writes to nothing."""
    if node.op not in ("call_function", "call_method") or "out" in node.kwargs:
        return False
    return _base_name(node) in _CHEAP and (_base_name(node) != "getattr" or node.args[1] in _ATTRIBUTES)


class _RefusedError(Exception):
    def __init__(self, node: Node, sentence: str, needed: str = "") -> None:
        super().__init__(sentence)
        self.reason = Reason(
            code="not_checkable",
            by=_BY,
            sentence=sentence,
            needed=needed,
            observed=op_name(node),
            node=node.name,
            source=source_line(node),
            lever="compute the mask from the model's inputs by cheap operators that write to nothing",
        )


def assumption(
    root: GraphModule,
    node: Node,
    *,
    sentence: str,
    saves: str = "",
    equals: float | None = None,
) -> Assumption | Reason:
    """Assume that every element of a tensor is true, or is a number.

    Args:
        root: the whole Dynamo graph (`PassContext.root`); `node` may be in the region of a checkpoint inside it.
        node: the tensor, of any shape and dtype; it is computed from placeholders by cheap operators.
        sentence: the assumption, for people.
        saves: what that saves, for people.
        equals: the number that every element is to be; None: every element is to be true (not zero).

    Returns:
        The assumption, or why it can't be checked at the entry of the graph.
    """
    try:
        needed = _backward_slice(root, (node,), shortened=True, truth=equals is None)
        _refuse_writes(root, needed.nodes)
    except _RefusedError as refused:
        return refused.reason
    return Assumption(
        check=_check_module(needed, lambda graph, values: _all_true(graph, values[0], equals)),
        inputs=tuple(n.name for n in needed.placeholders),
        sentence=sentence,
        saves=saves,
        source=source_line(node),
        bytes=needed.bytes,
    )


@records.dataclass(frozen=True, kw_only=True)
class Added:
    """A part of a mask that is added to the scores."""

    node: Node  # of a floating-point dtype, (batch, heads, queries, keys), each maybe 1
    hides: float  # numbers up to this one hide a key


def mask_assumption(
    root: GraphModule,
    keep: Node | None,
    added: Sequence[Added],
    *,
    accepts: frozenset[str],
    saves: str = "",
) -> Assumption | Reason:
    """Assume that a mask is of a class that its values show.

    Args:
        root: the whole Dynamo graph (`PassContext.root`).
        keep: which keys a query sees, bool, (batch, heads, queries, keys), each maybe 1; None: all.
        added: what is added to the scores as well.
        accepts: kinds of `MaskClass` that something is done about.
        saves: what that saves, for people.

    Returns:
        The assumption, of no class yet, or why it can't be checked at the entry of the graph.
    """
    nodes = [*((keep,) if keep is not None else ()), *(item.node for item in added)]
    try:
        needed = _backward_slice(root, nodes)
        _refuse_writes(root, needed.nodes)
    except _RefusedError as refused:
        return refused.reason

    def parts(graph: Graph, values: Sequence[Node]) -> Any:
        rest = tuple(values[keep is not None :])
        return values[0] if keep is not None else None, rest, tuple(item.hides for item in added)

    return Assumption(
        check=_check_module(needed, parts),
        inputs=tuple(n.name for n in needed.placeholders),
        sentence="the class of the mask",
        saves=saves,
        source=source_line(nodes[0]),
        bytes=needed.bytes,
        input_bytes=sum(map(_bytes, needed.placeholders)),
        accepts=accepts,
    )


@records.dataclass(frozen=True, kw_only=True)
class _Slice:
    """What computes `results`: nodes of the root and of regions inside it, operands first."""

    nodes: list[Node]
    origins: dict[Node, Node]  # a region's placeholder, and what the region was called with
    owners: dict[Graph, GraphModule]
    placeholders: list[Node]
    results: list[Node]
    bytes: int


def _backward_slice(
    root: GraphModule, nodes: Sequence[Node], *, shortened: bool = False, truth: bool = False
) -> _Slice:
    regions = dict(_callers(root))
    owners = {module.graph: module for module in _modules(root)}
    origins: dict[Node, Node] = {}

    def resolve(item: Node) -> Node:
        while item.op == "placeholder" and item.graph is not root.graph:
            origins[item] = _operand(item, regions)
            item = origins[item]
        return item

    results = [resolve(node) for node in nodes]
    for index, result in enumerate(results) if shortened else ():
        while (shorter := resolve(_shortest(result, truth))) is not result:
            results[index] = result = shorter
    for result in results:
        if _needs_gradient(result):
            raise _RefusedError(result, "gradients flow to it, which an assumption would cut off")
    order: list[Node] = []
    done: set[Node] = set()
    stack = [(result, False) for result in reversed(results)]
    while stack:
        item, operands_done = stack.pop()
        if operands_done:
            order.append(item)
            continue
        if item in done:
            continue
        done.add(item)
        if len(done) > _MOST_NODES:
            raise _RefusedError(item, f"more than {_MOST_NODES} operators compute it")
        _refuse_expensive(item, owners[item.graph])
        stack.append((item, True))
        stack += [(resolve(source), False) for source in reversed(item.all_input_nodes)]
    return _Slice(
        nodes=order,
        origins=origins,
        owners=owners,
        placeholders=[item for item in order if item.op == "placeholder"],
        results=results,
        bytes=sum(_bytes(item) for item in order if _base_name(item) not in _SAME_ELEMENTS),
    )


def _shortest(node: Node, truth: bool) -> Node:
    """The smallest tensor whose elements decide: views and copies of it add nothing."""
    while node.op in ("call_function", "call_method") and node.args and isinstance(node.args[0], Node):
        name = _base_name(node)
        whole = name == "getitem" and _takes_all(node.args[1])
        cast = truth and name in ("bool", "to") and getattr(fake_value(node), "dtype", None) == torch.bool
        if not (name in _SAME_ELEMENTS or whole or cast) or not isinstance(fake_value(node.args[0]), torch.Tensor):
            break
        node = node.args[0]
    return node


def _takes_all(index: Any) -> bool:
    """Whether an index only adds dimensions."""
    items = index if isinstance(index, tuple) else (index,)
    return all(item is None or item is Ellipsis or (type(item) is slice and item == slice(None)) for item in items)


def _refuse_expensive(node: Node, owner: GraphModule) -> None:
    value = fake_value(node)
    if node.op == "get_attr":
        value = getattr(owner, str(node.target), None)
        if not isinstance(value, torch.Tensor) or value.requires_grad:
            raise _RefusedError(node, "it is computed from what is no plain constant", "inputs and constants")
    elif node.op in ("call_function", "call_method"):
        name = _base_name(node)
        one_armed = name == "where" and len(node.args) + len(node.kwargs) < 3  # nonzero, by another name
        unknown = name == "getattr" and node.args[1] not in _ATTRIBUTES
        if name not in _CHEAP or one_armed or unknown or "out" in node.kwargs:
            raise _RefusedError(node, "it is computed by an operator that a check does not repeat", "cheap operators")
    elif node.op != "placeholder":
        raise _RefusedError(node, "it is computed by what a check can't repeat", "cheap operators")
    for leaf in tree_leaves(value):
        if is_subclass(leaf):
            raise _RefusedError(node, "it is a tensor that wraps others", "plain tensors")
        if isinstance(leaf, (torch.Tensor, torch.SymInt)) and free_unbacked_symbols(leaf):
            raise _RefusedError(node, "its size depends on data", "sizes known before the call")
    if _bytes(node) > _MOST_BYTES:
        raise _RefusedError(node, f"it has {_bytes(node)} bytes", f"at most {_MOST_BYTES}, so that the check is cheap")


def _needs_gradient(node: Node) -> bool:
    value = fake_value(node)
    return isinstance(value, torch.Tensor) and value.requires_grad


def _bytes(node: Node) -> int:
    """Bytes of a node's value; more than are accepted where nobody knows."""
    size = size_of([value for value in tree_leaves(fake_value(node)) if isinstance(value, torch.Tensor)])[1]
    return size if size >= 0 else _MOST_BYTES + 1


def _base_name(node: Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return base_name(target)
    name = target if isinstance(target, str) else str(getattr(target, "__name__", target))
    # A function of the program's own (`allow_in_graph`) may be called what one of torch's is.
    own = callable(target) and not isinstance(target, torch._ops.HigherOrderOperator)
    known = not own or getattr(target, "__module__", "") == "builtins" or is_torchs(target)
    return name if known else f"{getattr(target, '__module__', '')}.{name}"


def _modules(root: GraphModule) -> Iterator[GraphModule]:
    yield root
    for child in submodules(root):
        yield from _modules(child)


def _callers(root: GraphModule) -> Iterator[tuple[Graph, list[Node]]]:
    """For each region's graph, the operators that call it."""
    found: dict[Graph, list[Node]] = {}
    for module in _modules(root):
        for node in module.graph.nodes:
            for source in node.all_input_nodes:
                if source.op == "get_attr" and isinstance(
                    child := getattr(module, str(source.target), None), GraphModule
                ):
                    found.setdefault(child.graph, []).append(node)
    yield from found.items()


def caller_of(region: GraphModule, root: GraphModule) -> Node | None:
    """The one node that calls a region of a graph with operands in the order of what it takes; None if none does."""
    calls = dict(_callers(root)).get(region.graph, [])
    return calls[0] if len(calls) == 1 and _base_name(calls[0]) in _TRANSPARENT else None


def _operand(placeholder: Node, callers: dict[Graph, list[Node]]) -> Node:
    """What the region of a placeholder is called with there."""
    calls = callers.get(placeholder.graph, [])
    if len(calls) != 1 or _base_name(calls[0]) not in _TRANSPARENT:
        raise _RefusedError(placeholder, "it is an input of a region that is not called in one known way")
    (call,) = calls
    names = placeholder.graph.find_nodes(op="placeholder")
    operands = call.args[1:]
    value = operands[names.index(placeholder)] if len(operands) == len(names) else None
    if not isinstance(value, Node):
        raise _RefusedError(placeholder, "it is an input of a region that is not called with a tensor of the graph")
    return value


def may_write(root: GraphModule, nodes: Iterable[Node]) -> bool:
    """Whether a Dynamo graph may write to what some nodes return."""
    return not _all_written(root).isdisjoint(_storages(tree_leaves([fake_value(node) for node in nodes])))


def _refuse_writes(root: GraphModule, nodes: list[Node]) -> None:
    """The check runs before the graph does: what it reads must not be written to anywhere in the graph."""
    written = _all_written(root)
    for node in nodes:
        if not written.isdisjoint(_storages(tree_leaves(fake_value(node)))):
            raise _RefusedError(node, "the graph writes to it in place", "a tensor that nothing writes to")


def keeps_inputs(root: GraphModule) -> bool:
    """Whether a Dynamo graph writes to none of its inputs, and to no tensor that it holds."""
    written = _all_written(root)
    given = [node for module in _modules(root) for node in module.graph.nodes if node.op in ("placeholder", "get_attr")]
    values = [value for node in given for value in (fake_value(node), getattr(root, str(node.target), None))]
    return written.isdisjoint(_storages(tree_leaves(values)))


def _all_written(root: GraphModule) -> set[int]:
    """The storages that a Dynamo graph may write to."""
    written: set[int] = set()
    for module in _modules(root):
        for node in module.graph.nodes:
            written |= _storages(_written(node))
            # Writes are counted by the tensors that Dynamo traced with, but not by those of inference mode.
            own = [v for v in tree_leaves(fake_value(node)) if isinstance(v, torch.Tensor) and not v.is_inference()]
            written |= _storages([value for value in own if was_written(value)])
    return written


def _written(node: Node) -> list[Any]:
    """The values that an operator may write to."""
    if node.op not in ("call_function", "call_method"):
        return []
    target: Any = node.target
    name = _base_name(node)
    pure_names = getattr(operator, name, None) is target  # operator.and_
    if isinstance(target, torch._ops.OpOverload):
        writes = target._schema.is_mutable
    elif isinstance(target, torch._ops.HigherOrderOperator):
        writes = name not in _WRITES_NOTHING
    else:
        writes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and not pure_names)
    if writes and ((node.op == "call_method" and not name.startswith("_")) or getattr(operator, name, None) is target):
        # Methods and operators write to their first operand: `masked_fill_` and `+=` only read a mask.
        return [map_arg(node.args[0], fake_value)]
    if writes or bool(node.kwargs.get("inplace")):
        return [fake_value(source) for source in node.all_input_nodes]
    return tree_leaves(map_arg(node.kwargs.get("out"), fake_value))


def _storages(values: Any) -> set[int]:
    leaves = [value for value in tree_leaves(list(values)) if isinstance(value, torch.Tensor)]
    return {key for key in map(storage_key, leaves) if key is not None}


def _all_true(graph: Graph, value: Node, equals: float | None) -> Node:
    if equals is not None:
        value = graph.call_function(torch.eq, (value, equals))
    return graph.call_function(torch.all, (value,))


def _check_module(needed: _Slice, finish: Callable[[Graph, Sequence[Node]], Any]) -> GraphModule:
    graph = Graph()
    values: dict[Node, Node] = {}
    constants: dict[str, Any] = {}

    def copied(node: Node) -> Node:
        while node in needed.origins:
            node = needed.origins[node]
        return values[node]

    # Placeholders first, as a graph wants them.
    for index, node in enumerate(needed.placeholders):
        values[node] = graph.placeholder(f"input_{index}")
    for index, node in enumerate(needed.nodes):
        if node.op == "get_attr":
            name = f"constant_{index}"
            constants[name] = getattr(needed.owners[node.graph], str(node.target))
            values[node] = graph.get_attr(name)
        elif node.op != "placeholder":
            values[node] = graph.node_copy(node, copied)
            values[node].meta = {}
    graph.output(finish(graph, [values[result] for result in needed.results]))
    return GraphModule(constants, graph, "Check")


@records.dataclass(frozen=True, kw_only=True)
class _Rates:
    """Seconds that a check costs, and operations a second of attention by what it is given.

    A check reads so many `bytes` a second; where inputs are compared with those that are known, as many as `compared`.
    """

    check: float
    bytes: float
    compared: float | None
    dense: float
    none: float
    causal: float
    margin: float


# A thread of a CPU: torch 2.13 without AVX-512, fp32, 512 to 2048 tokens. A padding mask that is broadcast over the
# queries costs no more there than the noise, so that nothing is saved where the attention does not become causal.
_CPU: Final = _Rates(check=20e-6, bytes=1.4e9, compared=8e9, dense=2.5e10, none=2.5e10, causal=4e10, margin=4.0)
# One H200, bf16: a dense mask against the fastest kernel without one. A check waits for the device; all graphs that get
# the same mask share it, such as the layers of a model.
_ACCELERATOR: Final = _Rates(check=60e-6, bytes=1e12, compared=None, dense=1.5e14, none=4e14, causal=4e14, margin=1.0)
# Bytes for each element of a mask that operators for rows without a key read and write.
_GUARD_BYTES: Final = 8


def worth(
    device: str,
    *,
    flops: int,
    causal: bool,
    checked_bytes: int = 0,
    input_bytes: int = 0,
    sites: int = 1,
    guarded: int = 0,
) -> Reason | None:
    """Whether attention without a mask saves more than a check at each call and a second variant cost.

    Args:
        device: device type that the attention runs on.
        flops: operations of the attention that loses its mask, in all sites of one forward: 4·B·H·Q·K·D each.
        causal: whether it becomes `is_causal`, so that half of it is skipped; otherwise it keeps no mask at all.
        checked_bytes: `Assumption.bytes`.
        input_bytes: `Assumption.input_bytes`.
        sites: how many those are, for the reason.
        guarded: elements of a mask that rows without a key need not be looked for in.

    Returns:
        None if it pays, otherwise why not.
    """
    rates, threads = (_CPU, torch.get_num_threads()) if device == "cpu" else (_ACCELERATOR, 1)
    saved = flops * (1 / rates.dense - 1 / (rates.causal if causal else rates.none)) / threads
    saved += guarded * _GUARD_BYTES / rates.bytes
    cost, first = rates.check, checked_bytes / rates.bytes
    if rates.compared is None:
        cost, first = cost + first, 0.0
    else:
        cost += input_bytes / rates.compared  # a whole check once, and where a mask is another one
    if saved >= max(rates.margin * cost, first):
        return None
    return Reason(
        code="not_profitable",
        by=_BY,
        sentence="a check of the mask at each call would cost more than the mask does",
        observed=f"about {saved * 1e6:.0f} µs saved in {sites} site{'s' if sites != 1 else ''} on {device}",
        needed=f"{rates.margin:.0f} times the {cost * 1e6:.0f} µs of a check, and {first * 1e6:.0f} µs of the first",
        lever="pass no mask where nothing is padded",
    )
