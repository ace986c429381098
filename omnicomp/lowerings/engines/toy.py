"""The teaching engine: a subgraph becomes a list of steps on planned memory. `docs/new-engine.md` builds it up."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from omnicomp.lowerings.engines.base import Engine, EngineExecutable, Session
from omnicomp.lowerings.engines.clustering import Clustering
from omnicomp.lowerings.engines.subgraph import Subgraph

aten = torch.ops.aten


class ToyEngine(Engine):
    """Calls one function an operator, in an order and in memory that are planned beforehand."""

    name = "toy"
    clustering = Clustering(dtypes=(torch.float32,), training=True)
    contiguous = False
    native = False
    decompositions: ClassVar = {aten.silu.default: lambda x: x * torch.sigmoid(x)}

    def missing(self) -> str:
        """Nothing ever is: it needs torch alone."""
        return ""

    def version(self) -> str:
        """Counted up when the same subgraph is planned or computed otherwise."""
        return "2"

    def compile(self, subgraph: Subgraph) -> EngineExecutable:
        """Plan the steps of a subgraph of fixed sizes."""
        if subgraph.dynamic:
            raise NotImplementedError("memory is planned for fixed sizes; leave the option dynamic at 'classes'")
        return ToyExecutable(subgraph)


@ToyEngine.op(aten.relu.default)
def _relu(x: Tensor, *, out: Tensor) -> Tensor:
    return torch.clamp_min(x, 0, out=out)


@ToyEngine.op(aten.threshold_backward.default)
def _threshold_backward(grad: Tensor, x: Tensor, threshold: float, *, out: Tensor) -> Tensor:
    return torch.where(x <= threshold, grad.new_zeros(()), grad, out=out)


@ToyEngine.op(aten._softmax.default)
def _softmax(x: Tensor, dim: int, half_to_float: bool, *, out: Tensor) -> Tensor:
    return torch.softmax(x, dim, out=out)


@ToyEngine.op(aten.sum.dim_IntList, check=lambda node: "it sums in the dtype of the input" if node.kwargs else "")
def _sum(x: Tensor, dim: list[int] | None, keepdim: bool = False, *, out: Tensor) -> Tensor:
    return torch.sum(x, dim or list(range(x.dim())), keepdim, out=out)


for target, function in {
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.neg.default: torch.neg,
    aten.exp.default: torch.exp,
    aten.sigmoid.default: torch.sigmoid,
    aten.tanh.default: torch.tanh,
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.addmm.default: torch.addmm,
}.items():
    ToyEngine.op(target)(function)

for target, view in {
    aten.t.default: Tensor.t,
    aten.transpose.int: Tensor.transpose,
    aten.permute.default: Tensor.permute,
    aten.view.default: Tensor.reshape,
    aten.unsqueeze.default: Tensor.unsqueeze,
    aten.expand.default: Tensor.expand,
    aten.detach.default: Tensor.detach,
}.items():
    ToyEngine.op(target)(view)


def in_order(results: Sequence[Node]) -> list[Node]:
    """What the results need, each node behind those that it reads: depth first, so that little is alive at a time."""
    done: dict[Node, None] = {}
    waiting = list(reversed(results))
    while waiting:
        needed = [source for source in waiting[-1].all_input_nodes if source not in done]
        waiting.extend(reversed(needed))
        if not needed:
            done[waiting.pop()] = None
    return list(done)


def owners(order: Sequence[Node]) -> dict[Node, Node]:
    """In whose memory each value is: a view in that of what it looks at, any other in its own."""
    found: dict[Node, Node] = {}
    for node in order:
        found[node] = found[node.all_input_nodes[0]] if _is_view(node) else node
    return found


def planned(calls: Sequence[Node], owner: dict[Node, Node], returned: set[Node]) -> tuple[dict[Node, int], list[int]]:
    """Which buffer holds the result of a call, and the sizes of the buffers in bytes; what is returned has none."""
    last = {owner[value]: node for node in calls for value in (node, *node.all_input_nodes)}
    place: dict[Node, int] = {}
    sizes: list[int] = []
    free: list[int] = []
    for node in calls:
        if owner[node] is node and node not in returned:
            needed = _bytes_of(node.meta["val"])
            large = [index for index in free if sizes[index] >= needed]
            if large:
                place[node] = min(large, key=sizes.__getitem__)
                free.remove(place[node])
            else:
                place[node] = len(sizes)
                sizes.append(needed)
        free += [index for value, index in place.items() if last[value] is node]
    return place, sizes


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _bytes_of(value: Tensor) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (reach + 1) * value.dtype.itemsize if value.numel() else 0


def _memory_of(node: Node, buffer: Tensor | None = None) -> Tensor:
    like: Tensor = node.meta["val"]
    if buffer is None:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return buffer[: _bytes_of(like)].view(like.dtype).as_strided(like.shape, like.stride())


class ToyExecutable(EngineExecutable):
    """The steps of a subgraph, with the weights that were built in."""

    def __init__(self, subgraph: Subgraph) -> None:
        self._inputs, self._outputs = subgraph.inputs, subgraph.outputs
        self._weights = {subgraph.placeholders[index]: value for index, value in subgraph.constants.items()}
        for node in subgraph.module.graph.find_nodes(op="get_attr"):
            self._weights[node] = getattr(subgraph.module, node.target)
        results = [node for node in self._outputs if node is not None]
        order = in_order(results)
        self._steps = {node: _function(node) for node in order if node.op == "call_function"}
        owner = owners(order)
        self._lent = {node for node in results if owner[node] not in self._steps}
        self._place, self._sizes = planned(list(self._steps), owner, {owner[node] for node in results})

    @property
    def description(self) -> str:
        """How much of the memory serves more than once."""
        return f"{len(self._place)} results in {len(self._sizes)} buffers"

    @property
    def workspace_bytes(self) -> int:
        """Of one session."""
        return sum(self._sizes)

    def session(self) -> Session:
        """The steps with buffers of their own: in shared ones a thread would write over another one's results."""
        buffers = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in self._sizes]
        kept = {node: _memory_of(node, buffers[index]) for node, index in self._place.items()}
        return lambda inputs: self._run(kept, inputs)

    def _run(self, kept: dict[Node, Tensor], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        values = {**self._weights, **dict(zip(self._inputs, inputs, strict=True))}
        for node, function in self._steps.items():
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            if not _is_view(node):
                kwargs = {**kwargs, "out": kept[node] if node in kept else _memory_of(node)}
            values[node] = function(*args, **kwargs)
        return [node and (values[node].clone() if node in self._lent else values[node]) for node in self._outputs]


def _function(node: Node) -> Callable[..., Any]:
    entry = ToyEngine.operators.get(node.target)
    if entry is None or entry.convert is None:
        raise LookupError(f"it has no form of {node.target}")
    return entry.convert
