"""What a graph knows of its weights when engines may take parts of it, and that it is not decomposed then."""

import gc
from typing import Any

import fake_engines as fake
import pytest
import torch
from torch.fx import GraphModule

import omnicomp
from omnicomp.lowerings import GraphRecord, LoweringContext
from omnicomp.lowerings.engines import subgraph as engine_graphs
from omnicomp.lowerings.engines.subgraph import informed, str_or_int, weights_of
from omnicomp.options.policy import engines_of, parse
from omnicomp.timeline import Timeline

X = torch.randn(4, 6)


def captured(model: Any, *inputs: torch.Tensor) -> tuple[GraphModule, list[Any]]:
    found: list[Any] = []

    def backend(module: GraphModule, values: list[Any]) -> Any:
        found.extend([module, list(values)])
        return module.forward

    torch.compile(model, backend=backend)(*inputs)
    return found[0], found[1]


def context(part: str = "inference") -> LoweringContext:
    return LoweringContext(
        graph=GraphRecord(id="g0"),
        part=part,
        device=omnicomp.resolve_device("cpu"),
        policy=parse(None, {}),
        timeline=Timeline(),
    )


def test_engines_of_a_policy() -> None:
    assert engines_of(parse(None, {})) == ()
    assert engines_of(parse(None, {"lowerings": ["toy", "inductor"]})) == ("toy",)
    assert engines_of(parse(None, {"lowerings": {"aten.mm": ["toy", "eager"], "aten.add": ["toy"]}})) == ("toy",)


def test_weights_are_parameters_and_buffers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3)).eval()
    module, inputs = captured(model, X)
    found = weights_of(module, inputs)
    values = [reference() for reference in found.values()]
    wanted = [*model.parameters(), model[1].running_mean, model[1].running_var]
    assert {id(value) for value in values} == {id(value) for value in wanted}
    assert all(inputs[index] is reference() for index, reference in found.items())


def test_weights_are_not_kept_alive() -> None:
    model = torch.nn.Linear(6, 3)
    module, inputs = captured(model, X)
    found = weights_of(module, inputs)
    torch.compiler.reset()
    del model, inputs, module
    gc.collect()
    assert [reference() for reference in found.values()] == [None, None]


def test_fake_inputs_have_no_weights() -> None:
    module, inputs = captured(torch.nn.Linear(6, 3), X)
    with torch._subclasses.FakeTensorMode() as mode:
        assert weights_of(module, [mode.from_tensor(value) for value in inputs]) == {}


def part_of(module: GraphModule, inputs: list[Any]) -> GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        return make_fx(lambda *values: (module(*values),), tracing_mode="fake")(*inputs)


def test_a_part_is_told_its_weights() -> None:
    model = torch.nn.Linear(6, 3).eval()
    with torch.no_grad():
        module, inputs = captured(model, X)
        part = part_of(module, inputs)
    made = informed(context(), part, weights_of(module, inputs), len(inputs))
    assert made.undecomposed
    assert {id(reference()) for reference in made.weights.values()} == {id(each) for each in model.parameters()}
    names = [str(node.target) for node in part.graph.find_nodes(op="placeholder")]
    for name, reference in made.weights.items():
        assert inputs[names.index(name)] is reference()


@pytest.mark.parametrize(
    "fault", ["a part of training", "another number of inputs", "another shape", "a weight that died"]
)
def test_positions_that_may_mean_something_else_say_nothing(fault: str) -> None:
    model = torch.nn.Linear(6, 3).eval()
    with torch.no_grad():
        module, inputs = captured(model, X)
        part = part_of(module, inputs)
    weights: dict[int, Any] = dict(weights_of(module, inputs))
    index = next(iter(weights))
    made = context("forward" if fault == "a part of training" else "inference")
    count = len(inputs) + (fault == "another number of inputs")
    if fault == "another shape":
        weights[index] = lambda: torch.ones(7)
    if fault == "a weight that died":
        weights[index] = lambda: None
    found = informed(made, part, weights, count)
    assert found.undecomposed
    assert found.weights == {}


def test_sizes_are_compared_without_a_guard() -> None:
    assert str_or_int(3) == 3
    assert str_or_int("s0") == "s0"
    assert engine_graphs.str_or_int(True) == "True"


@pytest.mark.parametrize("lowerings", [["fake", "eager"], ["fake", "inductor", "eager"], {"aten.relu": ["fake"]}])
def test_an_engine_sees_operators_that_nobody_decomposed(monkeypatch: pytest.MonkeyPatch, lowerings: Any) -> None:
    from torch.ops import aten  # type: ignore[import-not-found]

    monkeypatch.setattr(fake.Fake, "operators", type(fake.Fake.operators)(fake.Fake.operators))
    fake.Fake.op(aten.gelu.default, aten.native_layer_norm.default, aten.silu.default)(lambda: None)
    engine: Any = fake.installed(monkeypatch, fake.Fake)
    if isinstance(lowerings, dict):
        lowerings = {f"aten.{name}": ["fake"] for name in ("gelu", "native_layer_norm", "silu", "relu", "addmm", "t")}

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (6,))))

    options: dict[str, Any] = {"lowerings": lowerings, "on_error": "raise"}
    with torch.no_grad():
        found = torch.compile(function, backend="omni", options=options)(X)
    torch.testing.assert_close(found, function(X))
    targets = {target for build in engine.builds for target in build.targets}
    assert {aten.gelu.default, aten.native_layer_norm.default, aten.silu.default} <= targets
