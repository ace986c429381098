"""Each operator of an engine's table on what the samples of PyTorch's operator database call it with, against eager."""

import copy
import dataclasses
import operator
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from omnicomp._torch import opinfo
from omnicomp._torch.autograd.decompose import decomposed
from omnicomp.devices import resolve_device
from omnicomp.lowerings.base import GraphRecord, LoweringContext
from omnicomp.lowerings.engines import Engine, Subgraph
from omnicomp.options.policy import Policy
from omnicomp.timeline import current

_DOUBLE = {torch.float32, torch.float16, torch.bfloat16}
_TIMES_EAGERS_ERROR = 8.0
# Values that nobody may rely on: what they hold is only defined where the kernel of the same library made it.
_UNDEFINED = {torch.ops.aten._native_batch_norm_legit_no_training.default: (1, 2)}
_ORDERS = {torch.ops.aten.sort.default, torch.ops.aten.topk.default}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an operator, and what eager made of it."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class _Recorder(TorchDispatchMode):
    def __init__(self, wanted: set[Any]) -> None:
        super().__init__()
        self.wanted = wanted
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = None
        if func in self.wanted:
            kept = _own((args, dict(kwargs or {})))
        result = func(*args, **(kwargs or {}))
        if kept is not None:
            self.calls.append(Call(func, *kept, _own(result)))
        return result


def calls(name: str, wanted: set[Any], dtype: torch.dtype, *, samples: int = 6, device: str = "cpu") -> Iterator[Call]:
    """What some samples of an entry of the database call, forward and backward."""
    entry = opinfo.find(name)
    if not opinfo.supports(entry, dtype, device):
        return
    differentiable = opinfo.differentiable(entry, dtype, device)
    recorder = _Recorder(wanted)
    given = opinfo.samples(entry, dtype, device, first=0, count=samples, requires_grad=differentiable)
    for sample in given:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with recorder, torch.set_grad_enabled(differentiable):
                    result = entry.op(sample.input, *sample.args, **sample.kwargs)
                    results = [v for v in tree_flatten(result)[0] if isinstance(v, torch.Tensor) and v.requires_grad]
                    if results:
                        torch.autograd.backward(results, [torch.randn_like(each) for each in results])
            except (RuntimeError, IndexError, NotImplementedError, ValueError, TypeError):
                continue  # eager does not take the sample
    yield from recorder.calls


def subgraph_of(call: Call, engine: Engine, *, first: bool = False) -> tuple[Subgraph, list[torch.Tensor], Node]:
    """The subgraph of one call, its inputs, and the node of the call; on request with the first result alone."""
    leaves, structure = tree_flatten((call.args, call.kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    mode = FakeTensorMode()
    graph = Graph()
    fakes: list[Any] = []
    mapped: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            node = graph.placeholder(f"x{len(fakes)}")
            node.meta["val"] = mode.from_tensor(leaf)
            fakes.append(node.meta["val"])
            mapped.append(node)
        else:
            mapped.append(leaf)
    args, kwargs = tree_unflatten(mapped, structure)
    called = graph.call_function(call.target, tuple(args), kwargs)
    fake_args, fake_kwargs = tree_map(lambda v: v.meta["val"] if isinstance(v, Node) else v, (args, kwargs))
    with mode:
        called.meta["val"] = call.target(*fake_args, **fake_kwargs)
    outputs: list[Node] = []
    if isinstance(called.meta["val"], torch.Tensor):
        outputs.append(called)
    else:
        for index, value in enumerate(called.meta["val"][:1] if first else called.meta["val"]):
            if isinstance(value, torch.Tensor):
                taken = graph.call_function(operator.getitem, (called, index))
                taken.meta["val"] = value
                outputs.append(taken)
    graph.output(tuple(outputs))
    module = GraphModule(torch.nn.Module(), graph)
    if engine.decompositions:
        module = decomposed(module, fakes, engine.decompositions, whole=False)
    device = next((value.device for value in _tensors(call.result)), torch.device("cpu"))
    return Subgraph(module=module, device=device), inputs, called


def refusal(engine: Engine, subgraph: Subgraph, node: Node) -> str:
    """Why the engine does not take the operator, or what it is made of; empty if it does."""
    context = LoweringContext(
        graph=GraphRecord(id="g0"),
        part="inference",
        device=resolve_device(subgraph.device.type),
        policy=Policy(),
        timeline=current(),
    )
    inside = [each for each in subgraph.module.graph.nodes if each.op == "call_function"]
    for each in [node, *inside]:
        reason = engine.supports(each, context)
        if reason is not None:
            return f"{reason.node}: {reason.sentence} {reason.observed}"
    return ""


def difference(engine: Engine, call: Call, *, contiguous: bool = True) -> str | None:
    """How the engine's result differs from eager's; empty if it does not, None if it refuses the call."""
    try:
        subgraph, inputs, node = subgraph_of(call, engine)
        if refusal(engine, subgraph, node):
            subgraph, inputs, node = subgraph_of(call, engine, first=True)
    except DynamicOutputShapeException:  # no graph of a subgraph's could hold it
        return None
    if refusal(engine, subgraph, node):
        return None
    given = [value.contiguous() if contiguous else value for value in inputs]
    got = list(engine.compile(subgraph).session()(given))
    expected = _tensors(call.result)[: len(got)]
    skipped = _UNDEFINED.get(call.target, ())
    for index, (mine, wanted) in enumerate(zip(got, expected, strict=True)):
        if index in skipped:
            continue
        if index == 1 and call.target in _ORDERS:  # of equal elements any may come first
            wanted, mine = (
                call.args[0].gather(_dim_of(call), order) if order.dim() else order for order in (wanted, mine)
            )
        if (mine.shape, mine.dtype) != (wanted.shape, wanted.dtype):
            return f"{tuple(mine.shape)} {mine.dtype} instead of {tuple(wanted.shape)} {wanted.dtype}"
        try:
            torch.testing.assert_close(mine, wanted, equal_nan=True)
        except AssertionError as error:
            if not _as_good(call, index, mine, wanted):
                return f"result {index}: " + " ".join(str(error).split())[:160]
    return ""


def _dim_of(call: Call) -> int:
    index = 1 if call.target is torch.ops.aten.sort.default else 2
    return call.args[index] if len(call.args) > index else -1


def _as_good(call: Call, index: int, mine: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether a result is at most a few times as far from the exact one as eager's."""
    if wanted.dtype not in _DOUBLE:
        return False
    args, kwargs = tree_map(_doubled, (call.args, call.kwargs))
    try:
        exact = _tensors(call.target(*args, **kwargs))[index]
    except RuntimeError:
        return False
    mine, wanted = mine.double(), wanted.double()
    finite = torch.isfinite(wanted)
    if not torch.equal(finite, torch.isfinite(mine)) or not finite.any():
        return False
    ours, eagers = ((value - exact)[finite].abs().max().item() for value in (mine, wanted))
    return ours <= _TIMES_EAGERS_ERROR * eagers


def _tensors(result: Any) -> Sequence[torch.Tensor]:
    return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]


def _doubled(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _DOUBLE else value
    return value.double() if isinstance(value, torch.Tensor) and value.dtype in _DOUBLE else value


def _own(value: Any) -> Any:
    return tree_map(lambda each: copy.deepcopy(each.detach()) if isinstance(each, torch.Tensor) else each, value)
