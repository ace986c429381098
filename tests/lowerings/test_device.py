"""A device's own compiler: it gets subgraphs, and what it can't build goes on to the next lowering, alone."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from recorded import events as of
from torch import Tensor
from torch.fx import GraphModule

from omnicomp.analysis.nodes import op_name
from omnicomp.devices.cpu import CpuDevice
from omnicomp.lowerings import in_order
from omnicomp.timeline import Option, Placement, Ran, Retreat

BUILT: list[list[str]] = []
REFUSED: set[str] = set()


class Program:
    """What the compiler makes of a graph."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        if "aten.exp.default" in BROKEN and any(op_name(node) in BROKEN for node in self.module.graph.nodes):
            raise RuntimeError("the card fell off the bus")
        return torch.fx.Interpreter(self.module).run(*arguments)


BROKEN: set[str] = set()


def compile_subgraph(self: Any, module: GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    operators = [op_name(node) for node in module.graph.nodes if node.op == "call_function"]
    if REFUSED & set(operators):
        raise KeyError(f"no kernel for {sorted(REFUSED & set(operators))[0]}")
    BUILT.append(operators)
    return Program(module)


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    BUILT.clear()
    REFUSED.clear()
    BROKEN.clear()
    monkeypatch.setattr(CpuDevice, "compile_subgraph", compile_subgraph)
    monkeypatch.setattr(CpuDevice, "lowerings", ("override", "device", "eager"))


def program(x: Tensor) -> Tensor:
    return (x.sin().exp() * 2).cos().sum()


def step(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None]:
    x = torch.linspace(-1, 1, 6).requires_grad_()
    result = function(x)
    result.backward()
    return result.detach(), x.grad


def check(**options: Any) -> None:
    compiled = torch.compile(program, backend="omni", options=options)
    for _ in range(2):
        for got, expected in zip(step(compiled), step(program), strict=True):
            torch.testing.assert_close(got, expected)


def test_it_stands_where_inductor_would() -> None:
    served = ("override", "device", "inductor", "eager")
    names = [lowering.name for lowering in in_order(("override", "inductor", "eager"), served)]
    assert names == ["override", "device", "inductor", "eager"]
    names = [lowering.name for lowering in in_order(("inductor", "device"), served)]
    assert names == ["inductor", "device", "eager"]
    assert [lowering.name for lowering in in_order(("eager",), served)] == ["eager"]


def test_it_gets_forward_and_backward_whole() -> None:
    check()
    assert len(BUILT) == 2
    assert {event.lowering for event in of(Ran)} == {"device"}
    assert all("Program" in event.evidence for event in of(Ran))
    assert all(set(event.nodes) == {"device"} for event in of(Placement))


def test_a_graph_that_comes_back_as_it_was_is_eager_in_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "compile_subgraph", lambda self, module, inputs: lambda args: module(*args))
    check()
    assert {event.lowering for event in of(Ran)} == {"eager"}
    assert all("the code of an FX graph" in event.evidence for event in of(Ran))


def test_what_it_refuses_leaves_alone() -> None:
    REFUSED.add("aten.exp.default")
    check()
    forward, backward = of(Placement)
    assert forward.nodes["eager"] == 1
    (declined,) = forward.declined
    assert (declined.op, declined.lowering) == ("aten.exp.default", "eager")
    assert "KeyError" in declined.chain[0].sentence
    assert declined.chain[0].by == "device"
    assert set(backward.nodes) == {"device"}
    (retreat,) = of(Retreat)
    assert (retreat.source_lowering, retreat.target_lowering) == ("device", "eager")


def test_a_compiler_that_is_not_there_costs_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def missing(self: Any, module: GraphModule, inputs: Sequence[Any]) -> Any:
        tried.append(1)
        raise NotImplementedError("nothing compiles here")

    monkeypatch.setattr(CpuDevice, "compile_subgraph", missing)
    check()
    assert len(tried) == 2, "one a part"
    assert {event.lowering for event in of(Ran)} == {"eager"}
    assert all("nothing compiles here" in event.reason.sentence for event in of(Retreat))


def test_a_call_that_fails_steps_down() -> None:
    BROKEN.add("aten.exp.default")
    check()
    (retreat,) = of(Retreat)
    assert (retreat.source_lowering, retreat.target_lowering) == ("device", "eager")
    assert "fell off the bus" in retreat.reason.sentence


def test_the_policy_can_leave_it_out() -> None:
    check(lowerings=["eager"])
    assert BUILT == []


def test_raise_is_obeyed() -> None:
    REFUSED.add("aten.exp.default")
    with pytest.raises(Exception, match=r"no kernel for aten\.exp"):
        step(torch.compile(program, backend="omni", options={"on_error": "raise"}))


def test_the_order_may_name_it() -> None:
    check(lowerings=["device", "eager"])
    assert len(BUILT) == 2


def test_a_device_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "lowerings", ("override", "inductor", "eager"))
    check(lowerings=["device", "eager"])
    (option,) = (event for event in of(Option) if event.key == "lowerings")
    assert (option.effective, option.reason.sentence) == ("eager", "cpu has no compiler of its own")
    assert {event.lowering for event in of(Ran)} == {"eager"}
