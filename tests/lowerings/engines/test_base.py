"""An engine that is missing or broken in any way: a reason that names it, the next level, and the model is right."""

import json
from collections.abc import Callable
from typing import Any

import fake_engines as fake
import pytest
import torch
from recorded import retreats

import omnicomp
from omnicomp.errors import EngineError
from omnicomp.lowerings import LoweringContext
from omnicomp.lowerings.engines import Engine
from omnicomp.timeline import Attempt, Placement, Ran, Reason, Retreat

aten = torch.ops.aten
X = torch.randn(4, 6)


def function(x: torch.Tensor) -> torch.Tensor:
    return (torch.exp(x) + torch.sin(x * 2)).relu()


def compiled(name: str, **options: Any) -> Callable[..., Any]:
    options = {"lowerings": [name, "eager"], **options}
    return torch.compile(function, backend="omni", options=options)


def check(name: str, **options: Any) -> list[str]:
    """Compile and call, with eager's values; the lowerings that ran."""
    torch.testing.assert_close(compiled(name, **options)(X), function(X), rtol=0, atol=0)
    return [event.lowering for event in omnicomp.timeline.events() if isinstance(event, Ran)]


def declined() -> list[Reason]:
    events = [event for event in omnicomp.timeline.events() if isinstance(event, Placement)]
    return [reason for event in events for node in event.declined for reason in node.chain]


def test_one_that_is_right_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake.installed(monkeypatch, fake.Fake)
    assert check("fake", on_error="raise") == ["fake"]
    (ran,) = [event for event in omnicomp.timeline.events() if isinstance(event, Ran)]
    assert ran.evidence.startswith("fake 1.0, from compiled; verified against float64: error ")
    (build,) = engine.builds  # type: ignore[attr-defined]
    assert build.targets == [aten.exp.default, aten.mul.Tensor, aten.sin.default, aten.add.Tensor, aten.relu.default]
    assert build.subgraph.threads == torch.get_num_threads()
    assert build.subgraph.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("owner", "sentence"),
    [
        (fake.Missing, 'FakeLib is not installed: pip install "omnicomp[fake]"'),
        (fake.TooOld, "FakeLib 1.0 is too old: 2.0 or newer is needed"),
        (fake.Unsure, "the engine fake_unsure can't say whether it is there: OSError: libfake.so: undefined symbol"),
    ],
)
def test_one_that_is_not_there(monkeypatch: pytest.MonkeyPatch, owner: type[fake.Fake], sentence: str) -> None:
    fake.installed(monkeypatch, owner)
    assert check(owner.name, on_error="raise") == ["eager"]
    for reason in declined():
        assert (reason.code, reason.by, reason.sentence, reason.lever) == (
            "engine_missing", owner.name, sentence, sentence,
        )  # fmt: skip
    assert len(declined()) == 5
    assert json.dumps(sentence) in omnicomp.audit().to_json()


def test_one_that_can_not_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(omnicomp.options.checks.BUILT_IN, "fake_gone", "no_such_module:Engine")
    omnicomp.options.checks.engine_names.cache_clear()
    assert check("fake_gone") == ["eager"]
    told = "the engine fake_gone can't be loaded: ModuleNotFoundError: No module named 'no_such_module'"
    assert any(
        told in str(event.reason) for event in omnicomp.timeline.events() if isinstance(event, (Retreat, Attempt))
    )


def test_one_operator_fails_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake.installed(monkeypatch, fake.NoBuild)
    assert check("fake_no_build") == ["fake_no_build", "eager", "fake_no_build"]
    (retreat,) = retreats()
    assert (retreat.source_lowering, retreat.target_lowering) == ("fake_no_build", "eager")
    reason = retreat.reason
    assert reason.code == "cut_out"
    assert reason.by == "fake_no_build"
    assert reason.sentence == "the engine fake_no_build can't build it: RuntimeError: no kernel for sin"
    assert reason.node == "sin (aten.sin.default)"
    assert "test_base.py" in reason.source
    assert len(engine.builds) <= 24  # type: ignore[attr-defined]


def test_nothing_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake.installed(monkeypatch, fake.Nothing)
    assert check("fake_nothing") == ["eager"]
    assert len(engine.builds) == 1  # type: ignore[attr-defined] - it said so; nothing smaller is tried
    assert "NotImplementedError: not today" in retreats()[0].reason.sentence


def test_what_is_no_executable(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.installed(monkeypatch, fake.NoExecutable)
    assert check("fake_no_executable", max_builds=2) == ["eager"]
    assert "made str, which is no EngineExecutable" in retreats()[0].reason.sentence


def test_errors_are_raised_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.installed(monkeypatch, fake.NoBuild)
    with pytest.raises(Exception, match="no kernel for sin"):
        compiled("fake_no_build", on_error="raise")(X)


def test_a_wrong_value_never_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.installed(monkeypatch, fake.Wrong)
    call = compiled("fake_wrong")
    for _ in range(3):
        torch.testing.assert_close(call(X), function(X), rtol=0, atol=0)
    (retreat,) = retreats()
    assert retreat.reason.code == "verification_failed"
    assert (retreat.source_lowering, retreat.target_lowering) == ("fake_wrong", "eager")
    assert [event.lowering for event in omnicomp.timeline.events() if isinstance(event, Ran)] == ["eager"]
    torch.compiler.reset()
    with pytest.raises(Exception, match="is wrong on fake_wrong"):
        compiled("fake_wrong", on_error="raise")(X)


def test_verification_may_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.installed(monkeypatch, fake.Wrong)
    assert not torch.allclose(compiled("fake_wrong", verify="off")(X), function(X))


def test_a_call_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.installed(monkeypatch, fake.Raises)
    monkeypatch.setattr(fake.Raises, "calls", 0)
    call = compiled("fake_raises")
    for _ in range(5):
        torch.testing.assert_close(call(X), function(X))
    (retreat,) = retreats()
    assert retreat.reason.code == "call_failed"
    assert "RuntimeError: the device is gone" in retreat.reason.sentence
    assert [event.lowering for event in omnicomp.timeline.events() if isinstance(event, Ran)] == [
        "fake_raises",
        "eager",
    ]


def test_a_build_in_a_call_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """With symbolic sizes it is built in a call."""
    fake.installed(monkeypatch, fake.NoBuild)
    options: dict[str, Any] = {"lowerings": ["fake_no_build", "eager"]}
    call = torch.compile(function, backend="omni", dynamic=True, options=options)
    for size in (3, 4):
        x = torch.randn(size, 6)
        torch.testing.assert_close(call(x), function(x))
    (retreat,) = retreats()
    assert "no kernel for sin" in retreat.reason.sentence


def test_a_checker_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake.Fake, "operators", type(Engine.operators)(fake.Fake.operators))
    fake.Fake.op(aten.sin.default, check=lambda node: f"no sine of {node.args[0]}")(lambda: None)
    fake.Fake.op(aten.relu.default, devices=("cuda",))(lambda: None)
    fake.Fake.op(aten.add.Tensor, dtypes=(torch.float64,))(lambda: None)
    fake.installed(monkeypatch, fake.Fake)
    assert check("fake", on_error="raise") == ["fake", "eager"]
    said = {reason.node.split()[0]: (reason.sentence, reason.observed, reason.needed) for reason in declined()}
    assert said == {
        "sin": ("no sine of mul", "", ""),
        "relu": ("it has no form of it here", "cpu", "cuda"),
        "add": ("it does not take the dtype", "torch.float32", "float64"),
    }


def test_a_refusal_needs_a_reason() -> None:
    with pytest.raises(EngineError, match="the engine fake refuses without a reason"):
        fake.Fake()._reason("unsupported_op", "")


def test_what_is_not_strided_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake.installed(monkeypatch, fake.Fake)

    class Context(LoweringContext):
        def __init__(self) -> None:
            """Nothing but what supports reads."""

        part = "inference"
        device = omnicomp.resolve_device("cpu")
        policy = omnicomp.options.policy.parse(None, {"lowerings": ["fake"]})

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten.relu.default, (x,))
    x.meta["val"] = node.meta["val"] = torch.ones(2, 2).to_sparse()
    reason = engine.supports(node, Context())
    assert reason is not None
    assert (reason.sentence, reason.observed) == ("it takes strided tensors alone", "torch.sparse_coo")
    x.meta["val"] = node.meta["val"] = torch.ones(2, 2)
    assert engine.supports(node, Context()) is None


def test_results_with_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A getitem goes where the operator went; the second result is not read."""
    fake.installed(monkeypatch, fake.Fake)
    options: dict[str, Any] = {"lowerings": ["fake", "eager"], "on_error": "raise"}
    call = torch.compile(lambda x: torch.topk(x * 2, 2)[1] + 1, backend="omni", options=options)
    torch.testing.assert_close(call(X), torch.topk(X * 2, 2)[1] + 1)
    assert [event.lowering for event in omnicomp.timeline.events() if isinstance(event, Ran)] == ["fake"]


def test_decompositions_are_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def silu(x: torch.Tensor) -> torch.Tensor:
        return x * torch.exp(x * 2)  # another function, so that it is seen

    monkeypatch.setattr(fake.Fake, "decompositions", {aten.silu.default: silu})
    engine = fake.installed(monkeypatch, fake.Fake)
    options: dict[str, Any] = {"lowerings": ["fake", "eager"], "verify": "off", "on_error": "raise"}
    call = torch.compile(torch.nn.functional.silu, backend="omni", options=options)
    torch.testing.assert_close(call(X), silu(X))
    assert engine.builds[0].targets == [aten.mul.Tensor, aten.exp.default, aten.mul.Tensor]  # type: ignore[attr-defined]


def test_the_rules_of_placement_may_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.installed(monkeypatch, fake.Fake)
    rules = {"*": ["eager"], "aten.sin": ["fake", "eager"]}
    assert check("fake", lowerings=rules) == ["eager", "fake", "eager"]


@pytest.mark.inductor
def test_what_it_does_not_take_is_inductors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor gets what it would have got from the start, decomposed."""
    fake.installed(monkeypatch, fake.Fake)

    def both(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(torch.exp(x) + 1)

    options: dict[str, Any] = {"lowerings": ["fake", "inductor", "eager"], "on_error": "raise"}
    torch.testing.assert_close(torch.compile(both, backend="omni", options=options)(X), both(X))
    assert [event.lowering for event in omnicomp.timeline.events() if isinstance(event, Ran)] == ["fake", "inductor"]
