"""Which casts of parameters leave a graph, and that the graph computes the same with copies as its inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from omnicomp._torch.fx import copy_module
from omnicomp.passes.dtypes.weights import Lifted, lift_casts

LOW = torch.bfloat16


class Owner(nn.Module):
    """Has a parameter `w` of 6 by 4, a buffer `b` like it, and calls a function of itself and an input."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(torch.randn(6, 4)), function
        self.register_buffer("b", torch.randn(6, 4))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def lift(model: nn.Module, x: Tensor, *, grad: bool = False) -> tuple[Lifted | None, GraphModule]:
    """Lift the casts of a model's graph, and check that it computes what the model does."""
    found: list[tuple[Lifted | None, GraphModule]] = []

    def backend(module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        text = str(module.graph)
        narrow = copy_module(module)
        lifted = lift_casts(narrow, inputs)
        found.append((lifted, narrow))
        assert str(module.graph) == text, "Dynamo's own graph stays as it is"
        if lifted is None:
            assert str(narrow.graph) == text
            return module.forward

        def call(*args: Any) -> Any:
            copies = [args[i].to(dtype) for i, dtype in zip(lifted.sources, lifted.dtypes, strict=True)]
            both = (*args, *copies)
            return narrow(*[both[i] for i in lifted.order])

        return call

    with torch.set_grad_enabled(grad):
        result = torch.compile(model, backend=backend, fullgraph=True)(x)
        assert torch.equal(result, model(x))
    ((lifted, narrow),) = found
    if lifted is not None:
        shapes = [tuple(node.meta["example_value"].shape) for node in narrow.graph.find_nodes(op="placeholder")]
        assert shapes == [tuple(value.shape) for value in lifted.inputs]
    return lifted, narrow


def dtype_of(node: torch.fx.Node) -> torch.dtype | None:
    return getattr(node.meta["example_value"], "dtype", None)


def casts(module: GraphModule) -> int:
    """How many tensors of low precision a graph makes of tensors of float32."""
    calls = [node for node in module.graph.nodes if node.op.startswith("call_") and node.all_input_nodes]
    return sum(dtype_of(node) is LOW and dtype_of(node.all_input_nodes[0]) is torch.float32 for node in calls)


LEAVING: dict[str, Callable[[Any, Tensor], Any]] = {
    "to": lambda m, x: x.sum() + m.w.to(LOW).sum(),
    "bfloat16": lambda m, x: x.sum() + m.w.bfloat16().sum(),
    "aten": lambda m, x: x.sum() + torch.ops.aten.to.dtype(m.w, LOW).sum(),
    "transposed": lambda m, x: x @ m.w.t().to(LOW).float(),
    "method": lambda m, x: x @ m.w.mT.to(LOW).float(),
    "reshaped": lambda m, x: x.sum() + m.w.view(2, 3, 4).permute(2, 0, 1).to(LOW).sum(),
    "detached": lambda m, x: x.sum() + m.w.detach().to(LOW).sum(),
    "in chunks": lambda m, x: x.sum() + sum(part.to(LOW).sum() for part in m.w.chunk(3)),
    "split": lambda m, x: x.sum() + sum(part.to(LOW).sum() for part in m.w.split([2, 4])),
    "in rows": lambda m, x: x.sum() + sum(row.to(LOW).sum() for row in m.w.unbind()),
    "in slices": lambda m, x: x.sum() + m.w[:3].to(LOW).sum() + m.w[3:].to(LOW).sum(),
    "twice": lambda m, x: (x.sum() + m.w.to(LOW).sum()) * m.w.t().to(LOW).sum(),
}


@pytest.mark.parametrize("name", LEAVING)
def test_casts_that_leave(name: str) -> None:
    lifted, module = lift(Owner(LEAVING[name]), torch.randn(5, 4))
    assert lifted is not None
    assert lifted.dtypes == (LOW,)
    assert casts(module) == 0
    assert len(lifted.order) == 2, "nothing else read the parameter"
    names = {node.name for node in module.graph.nodes}
    assert all(node.users or node.op == "output" for node in module.graph.nodes), names


def written(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.w.mul_(1)
    return x.sum() + m.w.to(LOW).sum()


def written_cast(m: Any, x: Tensor) -> Tensor:
    return x.sum() + m.w.to(LOW).mul_(2).sum()


STAYING: dict[str, Callable[[Any, Tensor], Any]] = {
    "an input": lambda m, x: x.to(LOW).sum() + m.w.sum(),
    "a buffer": lambda m, x: x.sum() + m.b.to(LOW).sum(),
    "written": written,
    "written after the cast": lambda m, x: x.sum() + m.w.to(LOW).sum() + m.w.detach().mul_(1).sum(),
    "a cast that is written": written_cast,
    "a cast that leaves": lambda m, x: m.w.to(LOW),
    "a view of a cast that leaves": lambda m, x: m.w.to(LOW).t()[1:],
    "a part": lambda m, x: x.sum() + m.w[:2].to(LOW).sum(),
    "not dense": lambda m, x: x.sum() + sum(part.to(LOW).view(-1).sum() for part in m.w.chunk(2, dim=1)),
    "expanded": lambda m, x: x.sum() + m.w.expand(2, 6, 4).to(LOW).sum(),
    "computed": lambda m, x: x.sum() + (m.w * 2).to(LOW).sum(),
    "float64": lambda m, x: x.sum() + m.w.to(torch.float64).sum(),
    "another device": lambda m, x: x.sum() + m.w.to("meta", LOW).numel(),
}


@pytest.mark.parametrize("name", STAYING)
def test_casts_that_stay(name: str) -> None:
    lifted, _ = lift(Owner(STAYING[name]), torch.randn(5, 4))
    assert lifted is None


def test_a_parameter_that_is_read_as_it_is_stays_beside_its_copy() -> None:
    def tied(m: Any, x: Tensor) -> Tensor:
        found = F.embedding(torch.tensor([1, 5]), m.w)
        return F.linear(found.to(LOW), m.w.to(LOW)).float() + x.sum()

    lifted, module = lift(Owner(tied), torch.randn(5, 4))
    assert lifted is not None
    assert len(lifted.inputs) == 3
    assert casts(module) == 1, "that of the activations"


def test_two_dtypes() -> None:
    lifted, _module = lift(Owner(lambda m, x: x.sum() + m.w.to(LOW).sum() + m.w.half().sum()), torch.randn(5, 4))
    assert lifted is not None
    assert lifted.dtypes == (LOW, torch.float16)
    assert lifted.sources[0] == lifted.sources[1]
    assert {value.dtype for value in lifted.inputs} == {LOW, torch.float16, torch.float32}
    assert len(lifted.inputs) == 3, "the parameter itself is not read any more"


def test_a_parameter_that_is_no_view_of_dense_memory() -> None:
    model = Owner(lambda m, x: x.sum() + m.w.to(LOW).sum())
    model.w = nn.Parameter(torch.randn(12, 4)[::2])
    lifted, _ = lift(model, torch.randn(5, 4))
    assert lifted is not None
    assert lifted.inputs[lifted.order.index(len(lifted.order))].is_contiguous()


def test_an_input_in_the_memory_of_the_parameter_that_is_written() -> None:
    model = Owner(lambda m, x: x.mul_(1).sum() + m.w.to(LOW).sum())
    lifted, _ = lift(model, model.w.detach()[0])
    assert lifted is None


def test_casts_inside_of_checkpointed_regions_stay() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return checkpoint(lambda y: F.linear(y.to(LOW), m.w.to(LOW)).float(), x, use_reentrant=False)

    lifted, _ = lift(Owner(forward), torch.randn(5, 4))
    assert lifted is None


def test_gradients_that_are_switched_on_inside() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        with torch.enable_grad():
            return (x.sum() + m.w.to(LOW).sum()).detach()

    lifted, _ = lift(Owner(forward), torch.randn(5, 4))
    assert lifted is None


def test_weights_of_symbolic_size_stay() -> None:
    model = Owner(lambda m, x: x.sum() + m.w.to(LOW).sum())
    torch._dynamo.mark_dynamic(model.w, 0)
    with torch._dynamo.config.patch(force_parameter_static_shapes=False):
        lifted, module = lift(model, torch.randn(5, 4))
    inputs = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
    assert any(isinstance(value, torch.SymInt) for value in inputs)
    assert lifted is None
