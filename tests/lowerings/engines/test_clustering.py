"""The options of clustering: as values, on nodes, and as they change what an engine gets of a model."""

from collections.abc import Callable
from typing import Any

import fake_engines as fake
import pytest
import torch

import omnicomp
from omnicomp.errors import EngineError, OptionError
from omnicomp.lowerings.engines import Clustering
from omnicomp.lowerings.engines.clustering import is_call
from omnicomp.timeline import Placement, Ran, Reason, Subgraph

aten = torch.ops.aten


def run(
    function: Callable[..., Any], *inputs: torch.Tensor, name: str = "fake", dynamic: bool | None = None, **values: Any
) -> list[str]:
    """Compile and call; values are right. The operators of each subgraph that the engine ran."""
    torch.compiler.reset()
    omnicomp.timeline.clear()
    options: dict[str, Any] = {"lowerings": [name, "eager"], "on_error": "raise", "engines": {name: values}}
    found = torch.compile(function, backend="omni", dynamic=dynamic, options=options)(*inputs)
    torch.testing.assert_close(found, function(*inputs))
    events = omnicomp.timeline.events()
    ran = {event.subgraph for event in events if isinstance(event, Ran) and event.lowering == name}
    planned = [event for event in events if isinstance(event, Subgraph) and event.subgraph in ran]
    return [" ".join(sorted(op.split(".")[1] for op in event.ops)) for event in planned]


def reasons(code: str = "cluster_refused") -> list[Reason]:
    events = [event for event in omnicomp.timeline.events() if isinstance(event, Placement)]
    chains = [reason for event in events for node in event.declined for reason in node.chain]
    return [reason for reason in chains if reason.code == code]


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> fake.Fake:
    fake.installed(monkeypatch, fake.Training)
    return fake.installed(monkeypatch, fake.Fake)  # type: ignore[return-value]


X = torch.randn(4, 6)


def test_the_smallest_subgraph() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x).t() + 1  # two operators; a view does not count
        z = torch.cumsum(y, 0)
        return torch.exp(torch.sin(z)) + z

    assert run(function, X) == ["add exp t", "add exp sin"]
    assert run(function, X, smallest=3) == ["add exp sin"]
    (said,) = {reason.sentence for reason in reasons()}
    assert said == "it has 2 operators, and the smallest subgraph has 3"
    assert run(function, X, smallest=4) == []


def test_views_alone_are_not_worth_a_subgraph() -> None:
    assert run(lambda x: torch.cumsum(x, 0).t(), X) == []
    assert reasons()[0].sentence == "it has 0 operators, and the smallest subgraph has 1"


def test_strict_dependencies() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.exp(x) + 1, torch.sin(x) * 2

    assert run(function, X) == ["add exp mul sin"]
    assert run(function, X, strict=True) == ["add exp", "mul sin"]


def test_dtypes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) + 1

    assert run(function, X.double()) == ["add exp"]
    assert run(function, X.double(), dtypes=(torch.float32,)) == []
    assert reasons("unsupported_op")[0].observed == "torch.float64"
    assert reasons("unsupported_op")[0].needed == "float32"


def test_devices() -> None:
    assert run(torch.exp, X, devices=("cuda",)) == []
    (reason,) = reasons("unsupported_op")
    assert (reason.sentence, reason.observed, reason.needed) == ("it is not for this device", "cpu", "cuda")


def test_training() -> None:
    x = X.clone().requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) * 2

    assert run(function, x) == []
    assert reasons("unsupported_op")[0].sentence == "it is for inference alone"
    # What is saved for the backward is an operator in between.
    assert run(function, x, training=True) == ["exp", "mul"]
    assert run(function, x, name="fake_training") == ["exp", "mul"]
    assert run(function, x, name="fake_training", training=False) == []


def test_an_operator_of_inference_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Picky(fake.Training):
        name = "picky"

    Picky.op(aten.sin.default, train=False)(lambda: None)
    monkeypatch.setattr(fake, "Picky", Picky, raising=False)
    Picky.__module__, Picky.__qualname__ = "fake_engines", "Picky"
    fake.installed(monkeypatch, Picky)
    assert run(lambda x: torch.sin(torch.exp(x)), X, name="picky") == ["exp sin"]
    assert run(lambda x: torch.sin(torch.exp(x)), X.clone().requires_grad_(), name="picky") == ["exp"]
    assert reasons("unsupported_op")[0].sentence == "it takes the operator in inference alone"


def test_mutable_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What writes to an input stays in eager; the operators around it go to the engine."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        return x.mul_(2).exp()

    assert run(function, X) == ["exp mul"]  # functional behind autograd

    def writes(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.exp()

    call = torch.compile(writes, backend="omni", options={"lowerings": ["fake", "eager"], "on_error": "raise"})
    x, y = X.clone(), X.clone()
    torch.testing.assert_close(call(x), writes(y))
    torch.testing.assert_close(x, y)
    assert any(reason.sentence == "it has no form of the operator" for reason in reasons("unsupported_op"))


def test_an_operator_that_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake.Fake, "operators", type(fake.Fake.operators)(fake.Fake.operators))
    fake.Fake.op(aten.copy_.default)(lambda: None)

    def writes(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.exp()

    call = torch.compile(writes, backend="omni", options={"lowerings": ["fake", "eager"]})
    x, y = X.clone(), X.clone()
    torch.testing.assert_close(call(x), writes(y))
    torch.testing.assert_close(x, y)
    assert any(reason.sentence == "the operator writes to an input" for reason in reasons("unsupported_op"))


def test_aliases() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.cumsum(x, 0)  # eager
        seen = y.t()
        return torch.exp(seen), seen.cumsum(0)

    assert run(function, X) == ["exp t"]
    assert run(function, X, aliases=False) == []
    assert reasons()[0].sentence == "its result t is a view of an input, of which the engine would return a copy"


# Symbolic sizes.


def dynamic(function: Callable[..., Any], *shapes: tuple[int, ...], **values: Any) -> tuple[list[str], list[str]]:
    torch.compiler.reset()
    omnicomp.timeline.clear()
    inputs = [torch.randn(shape) for shape in shapes]
    options: dict[str, Any] = {"lowerings": ["fake", "eager"], "on_error": "raise", "engines": {"fake": values}}
    call = torch.compile(function, backend="omni", options=options)
    for x in inputs:
        for index in range(x.dim()):
            torch._dynamo.maybe_mark_dynamic(x, index)
        torch.testing.assert_close(call(x), function(x))
    ran = [event.lowering for event in omnicomp.timeline.events() if isinstance(event, Ran)]
    return ran, [reason.sentence for reason in reasons()]


def pointwise(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x) + torch.sin(x)


SHAPES = ((4, 6), (5, 7), (6, 8), (4, 6))


def test_classes_of_sizes_are_built_one_by_one(engine: fake.Fake) -> None:
    ran, said = dynamic(pointwise, *SHAPES)
    assert (ran, said) == (["fake"], [])
    assert len(engine.builds) == 3
    for build in engine.builds:
        assert not build.subgraph.dynamic
        assert all(type(size) is int for value in build.subgraph.values for size in value.shape)  # type: ignore[union-attr]


def test_few_classes_are_kept(engine: fake.Fake) -> None:
    dynamic(pointwise, *SHAPES, (4, 6), most_classes=2)
    assert len(engine.builds) == 4  # the first was given up for the third


def test_any_sizes_are_built_once(engine: fake.Fake) -> None:
    ran, said = dynamic(pointwise, *SHAPES, dynamic="any")
    assert (ran, said) == (["fake"], [])
    assert len(engine.builds) == 1
    assert engine.builds[0].subgraph.dynamic


def test_symbolic_sizes_are_refused(engine: fake.Fake) -> None:
    ran, said = dynamic(pointwise, *SHAPES, dynamic="refused")
    assert set(ran) == {"eager"}
    assert "has symbolic sizes" in said[0]
    assert engine.builds == []


def test_symbolic_batches_are_taken(engine: fake.Fake) -> None:
    def batches(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[1] == 6)
        return pointwise(x)

    torch.compiler.reset()
    options: dict[str, Any] = {"lowerings": ["fake", "eager"], "engines": {"fake": {"dynamic": "batch"}}}
    call = torch.compile(batches, backend="omni", options=options)
    for size in (4, 5, 6):
        x = torch.randn(size, 6)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        torch.testing.assert_close(call(x), batches(x))
    assert len(engine.builds) == 1
    ran, said = dynamic(pointwise, *SHAPES, dynamic="batch")
    assert ran[-1] == "eager"
    assert "is symbolic, and the engine takes symbolic batches alone" in said[-1]


@pytest.mark.parametrize("policy", ["classes", "any"])
def test_sizes_have_bounds(policy: str) -> None:
    ran, said = dynamic(pointwise, *SHAPES, dynamic=policy, sizes=(8, None))
    assert set(ran) == {"eager"}
    assert "and the engine takes 8 or more" in said[0]
    _, said = dynamic(pointwise, *SHAPES, dynamic=policy, sizes=[None, 64])
    assert "and the engine takes 64 or less" in said[0]
    ran, said = dynamic(pointwise, *SHAPES, dynamic=policy, sizes=(2, None))
    assert (set(ran), said) == ({"fake"}, [])


# Values.


def test_changed_values() -> None:
    base = Clustering(smallest=2)
    assert base.changed("e", {"smallest": 3, "sizes": [1, 4]}) == Clustering(smallest=3, sizes=(1, 4))
    assert base.changed("e", {}) == base


def test_options_of_trial_processes_are_accepted_and_have_no_effect() -> None:
    base = Clustering(smallest=2)
    with pytest.warns(DeprecationWarning, match="option trial_seconds of the engine e has no effect"):
        assert base.changed("e", {"trial_seconds": 1, "smallest": 3}) == Clustering(smallest=3)
    with pytest.warns(DeprecationWarning, match="option trial of"):
        assert base.changed("e", {"trial": False}) == base


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"smalest": 2}, "the engine fake has no option 'smalest'; did you mean"),
        (
            {"smallest": "2"},
            "option smallest of the engine fake can't be '2'; it takes a value",
        ),
        ({"smallest": -1}, "can't be -1"),
        ({"strict": 1}, "can't be 1"),
        ({"dynamic": "all"}, "can't be 'all'"),
        ({"dtypes": "float32"}, "can't be 'float32'"),
        ({"dtypes": ["float32"]}, "option dtypes"),
        ({"devices": "cpu"}, "can't be 'cpu'"),
        ({"sizes": (1,)}, "option sizes"),
        ({"workspace_bytes": 0}, "can't be 0"),
        ({"workspace_bytes": True}, "can't be True"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError) as caught:
        Clustering().changed("fake", values)
    assert message in str(caught.value)
    with pytest.raises(OptionError) as said:
        torch.compile(torch.exp, backend="omni", options={"engines": {"fake": values}})(X)
    assert message in str(said.value)


def test_views_and_parts_are_no_calls() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert not is_call(x)
    assert not is_call(graph.call_function(aten.t.default, (x,)))
    assert not is_call(graph.call_function(aten.split.Tensor, (x, 2)))
    assert is_call(graph.call_function(aten.clone.default, (x,)))
    assert is_call(graph.call_function(aten.exp.default, (x,)))
