import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from concurrency import in_threads
from tiers import fast
from torch.fx.experimental.proxy_tensor import make_fx

import omnicomp
from omnicomp.lowerings.engines import Subgraph, toy
from omnicomp.lowerings.engines.toy import ToyEngine, ToyExecutable, in_order, owners, planned
from omnicomp.timeline import Ran

ROOT = Path(__file__).parents[3]
aten = torch.ops.aten


def compiled(function: Any, **options: Any) -> Callable[..., Any]:
    options = {"lowerings": ["toy", "eager"], "on_error": "raise", **options}
    return torch.compile(function, backend="omni", options=options)


def ran() -> list[str]:
    return [event.lowering for event in omnicomp.timeline.events() if isinstance(event, Ran)]


def test_the_tutorial_builds_the_module_that_stands() -> None:
    """Its blocks of Python, in order, are all of the module."""
    text = (ROOT / "docs" / "new-engine.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    source = Path(toy.__file__).read_text(encoding="utf-8")

    def lines(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.strip()]

    assert len(blocks) > 15
    assert [line for block in blocks for line in lines(block)] == lines(source)


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "neg": torch.neg,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": torch.nn.functional.silu,
    "softmax": lambda x: torch.softmax(x, -1) if x.dim() else x * 2,
    "sum of all": lambda x: x.sum(dim=[]) if not x.dim() else x.sum(dim=tuple(range(x.dim()))),
    "sum of a dimension": lambda x: x.sum(-1, keepdim=True) if x.dim() else x + 1,
    "arithmetic": lambda x: torch.add(x, x * 3, alpha=2) - x / 2,
}
INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(6, 4).t(),
    "strided": lambda: torch.randn(4, 12)[:, ::2],
    "a view with an offset": lambda: torch.randn(50)[3:27].view(4, 6),
    "expanded": lambda: torch.randn(4, 1).expand(4, 6),
    "empty": lambda: torch.randn(0, 6),
    "zero-dimensional": lambda: torch.randn(()),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    fast(itertools.product(UNARY, INPUTS), lambda case: case[0] == "exp" or case[1] == "transposed"),
)
def test_an_operator_gives_what_eager_gives(name: str, kind: str) -> None:
    function, x = UNARY[name], INPUTS[kind]()
    found, expected = compiled(function)(x), function(x)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()
    assert "toy" in ran()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.mm(x, y.t()),
        lambda x, y: torch.addmm(x[:, :4].contiguous(), x, y.t(), beta=0.5, alpha=2),
        lambda x, y: torch.bmm(x.unsqueeze(0).expand(3, 4, 6), y.t().unsqueeze(0).expand(3, 6, 4)),
        lambda x, y: (x.view(2, 2, 6).permute(2, 0, 1) + y.view(2, 2, 6).transpose(0, 2).transpose(1, 2)).sum(0),
    ],
    ids=["mm", "addmm", "bmm", "views"],
)
def test_products_and_views(function: Callable[..., torch.Tensor]) -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    torch.testing.assert_close(compiled(function)(x, y), function(x, y))
    assert "toy" in ran()


def test_a_training_step() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    x = torch.randn(4, 6, requires_grad=True)

    def gradients(call: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(torch.softmax(call(x), -1)[:, 0].sum(), [x, *model.parameters()])

    torch.testing.assert_close(gradients(compiled(model)), gradients(model))
    assert ran() == ["toy", "toy"]


def test_what_it_takes_not() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(x, 0) + x.sum(0, dtype=torch.float64).float()

    x = torch.randn(4, 6)
    torch.testing.assert_close(compiled(function)(x), function(x))
    (placement,) = [event for event in omnicomp.timeline.events() if event.type == "placement"]
    said = {each.op: each.chain[0].sentence for each in placement.declined}  # type: ignore[attr-defined]
    assert said["aten.sum.dim_IntList"] == "it sums in the dtype of the input"
    assert said["aten.cumsum.default"] == "it has no form of the operator"
    assert said["aten._to_copy.default"] == "it has no form of the operator"


def test_symbolic_sizes_are_refused_where_it_is_made_to_see_them() -> None:
    options = {"engines": {"toy": {"dynamic": "any"}}, "on_error": "retreat"}
    call = torch.compile(
        lambda x: x.exp() + 1, backend="omni", dynamic=True, options={"lowerings": ["toy", "eager"], **options}
    )
    x = torch.randn(4, 6)
    torch.testing.assert_close(call(x), x.exp() + 1)
    assert ran() == ["eager"]
    (retreat,) = [event for event in omnicomp.timeline.events() if event.type == "retreat"]
    assert "memory is planned for fixed sizes" in retreat.reason.sentence  # type: ignore[attr-defined]


# Order and memory.


def graph_of(function: Callable[..., Any], *inputs: torch.Tensor) -> torch.fx.GraphModule:
    def in_a_tuple(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = function(*values)
        return result if isinstance(result, tuple) else (result,)

    return make_fx(in_a_tuple, tracing_mode="fake")(*inputs)


def plan_of(module: torch.fx.GraphModule) -> tuple[list[torch.fx.Node], dict[torch.fx.Node, int], list[int]]:
    results = list(next(iter(reversed(module.graph.nodes))).all_input_nodes)
    order = in_order(results)
    owner = owners(order)
    calls = [node for node in order if node.op == "call_function"]
    return calls, *planned(calls, owner, {owner[node] for node in results})


def test_the_order_has_what_is_needed_behind_what_it_needs() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        a, b = x.exp(), x.tanh()
        x.sigmoid()  # nobody reads it
        return (a.exp() + 1) * (b.exp() + a)

    module = graph_of(function, torch.randn(3))
    order = in_order(list(next(iter(reversed(module.graph.nodes))).all_input_nodes))
    seen: set[torch.fx.Node] = set()
    for node in order:
        assert seen.issuperset(node.all_input_nodes)
        seen.add(node)
    assert len(order) == len(seen)
    assert not any(node.target is aten.sigmoid.default for node in order)


def test_a_chain_needs_two_buffers() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = torch.tanh(x)
        return x

    calls, place, sizes = plan_of(graph_of(function, torch.randn(5, 4)))
    assert len(calls) == 10
    assert len(place) == 9  # the last one is the caller's
    assert sizes == [80, 80]


def test_memory_that_is_read_is_not_given_away() -> None:
    """Also where what reads it is a view of it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        a = x.exp()
        seen = a.t()
        b = (a + x).tanh().sigmoid().neg()
        return b + seen.t() + x.exp().neg()

    module = graph_of(function, torch.randn(4, 6))
    calls, place, sizes = plan_of(module)
    last = {node: max(map(calls.index, _readers(node)), default=0) for node in calls}
    shared = 0
    for later in place:
        for earlier in place:
            if place[earlier] == place[later] and calls.index(earlier) < calls.index(later):
                assert last[earlier] < calls.index(later), (earlier, later)
                shared += 1
    assert shared > 2
    assert len(sizes) == 3


def _readers(node: torch.fx.Node) -> set[torch.fx.Node]:
    """What reads a value or a view of it, by the names of the views that the test uses."""
    found: set[torch.fx.Node] = set()
    for user in node.users:
        if user.op == "call_function":
            found |= {user} | (_readers(user) if user.target is aten.t.default else set())
    return found


def test_a_smaller_result_fits_into_a_larger_buffer() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.exp().sum(1).tanh().exp().neg()

    _, place, sizes = plan_of(graph_of(function, torch.randn(8, 6)))
    assert sizes == [192, 32]
    assert len(place) == 4


def test_results_belong_to_the_caller() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(x).exp()
        return y, y.t() * 2

    call = compiled(function)
    first = call(torch.ones(3, 4))
    before = [value.clone() for value in first]
    call(torch.zeros(3, 4))
    assert all(map(torch.equal, first, before))


def test_an_input_that_is_returned_is_copied() -> None:
    module = graph_of(lambda x: (x.t(), x.exp()), torch.randn(3, 4))
    x = torch.randn(3, 4)
    view, _ = ToyExecutable(Subgraph(module=module)).session()([x])
    assert view is not None
    assert torch.equal(view, x.t())
    assert view.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_each_thread_has_buffers_of_its_own() -> None:
    call, wrong = compiled(lambda x: torch.tanh(torch.exp(torch.tanh(x) * 2)) + 1), []

    def work(seed: int) -> None:
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
        expected = torch.tanh(torch.exp(torch.tanh(x) * 2)) + 1
        wrong.extend(seed for _ in range(50) if not torch.allclose(call(x), expected))

    call(torch.randn(64, 64))
    in_threads(work)
    assert wrong == []


def test_a_session_made_in_inference_mode_serves_later_calls() -> None:
    call, x = compiled(lambda x: x.exp().tanh().exp()), torch.randn(3)
    with torch.inference_mode():
        call(x)
    torch.testing.assert_close(call(x), x.exp().tanh().exp())
    assert set(ran()) == {"toy"}


def test_a_constant_of_the_graph() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.exp() * torch.tensor([1.0, 2.0, 3.0]) + 1

    x = torch.randn(2, 3)
    torch.testing.assert_close(compiled(function)(x), function(x))


def test_an_operator_without_a_form_is_an_error() -> None:
    module = graph_of(lambda x: x.cumsum(0), torch.randn(3))
    with pytest.raises(LookupError, match=r"it has no form of aten\.cumsum"):
        ToyEngine().compile(Subgraph(module=module))
