"""The option `fallback` at work: when a graph is built or restored, in a backward, in calls, with acknowledgements.

Engines stand in for a compiler, and rules leave Inductor nothing, so that no C++ is compiled.
"""

import datetime
import logging
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fake_engines
import pytest
import torch
from torch import Tensor

import omnicomp
from omnicomp.builder import cache_keys
from omnicomp.errors import FallbackError, OmnicompError
from omnicomp.lowerings.engines import Clustering
from omnicomp.timeline import Cache, current

TOY = ["toy", "eager"]
TOMORROW = datetime.date.today() + datetime.timedelta(days=1)
ENTRY = '[[tool.omnicomp.acknowledge]]\nselector = "aten.topk"\n'


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project without acknowledgements; nothing was told before."""
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("omnicomp.options.acknowledged._told", set())
    monkeypatch.setattr("omnicomp.runtime.fallback_limit._said", set())


def program(x: Tensor) -> Tensor:
    values, _ = torch.topk(x * 2, 2)
    return values.exp() + 1


def compiled(function: Callable[..., Any] = program, *, lowerings: Any = TOY, **options: Any) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, backend="omni", options={"lowerings": lowerings, **options})


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_excess_is_one_warning_that_says_what_where_and_why(caplog: pytest.LogCaptureFixture) -> None:
    call = compiled(fallback={})
    call(torch.rand(3, 4))
    call(torch.rand(3, 4))
    (said,) = warnings(caplog)
    assert "over the fallback budget: 1 operator runs eager (at most 0)" in said
    assert f"aten.topk.default at {__file__}:" in said
    assert "toy: it has no form of the operator" in said


def test_an_excess_can_be_an_error(caplog: pytest.LogCaptureFixture) -> None:
    call = compiled(fallback={"on_excess": "error"})
    for _ in range(2):
        with pytest.raises(FallbackError, match=r"aten\.topk\.default at .*test_fallback_limit\.py:\d+") as caught:
            call(torch.rand(3, 4))
        assert isinstance(caught.value, OmnicompError)
        assert "rewrite" not in str(caught.value)
    assert warnings(caplog) == []


def test_the_lever_of_a_reason_is_told() -> None:
    rules = {"*": TOY, "aten.exp": "eager"}
    with pytest.raises(FallbackError, match=r"aten\.exp\.default .* To change this: take it out of options="):
        compiled(lambda x: x.exp() + 1, lowerings=rules, fallback={"on_excess": "error"})(torch.rand(3))


@pytest.mark.parametrize(
    "fallback",
    [
        {"max_nodes": 1},
        {"max_flops_share": 0.9},
        {"allow": ["aten.topk"]},
        {"allow": ["aten.topk.default"]},
        {"allow": ["program"]},
        {"allow": ["*"]},
        {"max_nodes": None},
    ],
)
def test_what_is_within_the_budget_runs(fallback: dict[str, Any]) -> None:
    x = torch.rand(3, 4)
    torch.testing.assert_close(compiled(fallback={**fallback, "on_excess": "error"})(x), program(x))


def test_the_share_is_of_the_graphs_own_work() -> None:
    with pytest.raises(FallbackError, match=r"33\.3 % of FLOPs \(at most 1\.0 %\)"):
        compiled(fallback={"max_flops_share": 0.01, "on_excess": "error"})(torch.rand(3, 4))


def test_a_policy_that_asks_no_compiler_is_a_choice(caplog: pytest.LogCaptureFixture) -> None:
    for lowerings in (["eager"], ["override", "eager"]):
        compiled(lowerings=lowerings, fallback={"on_excess": "error"})(torch.rand(3, 4))
    assert warnings(caplog) == []


def test_a_module_can_be_allowed() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.topk(x, 2)[0]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(), Layer()])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x) + 1) + 1

    with pytest.raises(FallbackError, match="1 operator runs eager") as caught:
        compiled(Model(), fallback={"allow": ["layers.0"], "on_excess": "error"})(torch.rand(3, 4))
    assert "in layers.1" in str(caught.value)
    compiled(Model(), fallback={"allow": ["layers.*"], "on_excess": "error"})(torch.rand(3, 4))


def test_a_backward_is_judged_when_it_is_built(caplog: pytest.LogCaptureFixture) -> None:
    def cumulated(x: Tensor) -> Tensor:
        return (x.relu() + 1).cumsum(-1)

    rules = {"*": TOY}
    fallback = {"max_nodes": 1, "allow": ["aten.detach"], "on_excess": "error"}
    x = torch.rand(4, requires_grad=True)
    out = compiled(cumulated, lowerings=rules, fallback=fallback)(x)
    with pytest.raises(FallbackError, match=r"aten\.flip\.default .*\(backward\)"):
        out.sum().backward()


class Fading(fake_engines.Fake):
    """It raises in calls of one operator once it is told to."""

    name = "fake_fading"
    clustering = Clustering(training=True)
    failing: ClassVar[Any] = None

    def call(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is Fading.failing:
            raise RuntimeError("the device is gone")
        return super().call(target, args, kwargs)


@pytest.fixture
def fading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    fake_engines.installed(monkeypatch, Fading)

    def fail(target: Any) -> None:
        Fading.failing = target

    yield fail
    Fading.failing = None


FADING: dict[str, Any] = {"lowerings": ["fake_fading", "eager"], "verify": "off"}


def test_what_moves_in_a_call_is_a_warning_then(fading: Any, caplog: pytest.LogCaptureFixture) -> None:
    call, x = compiled(torch.sin, **FADING, fallback={}), torch.rand(3)
    call(x)
    assert warnings(caplog) == []
    fading(torch.ops.aten.sin.default)
    for _ in range(3):
        torch.testing.assert_close(call(x), torch.sin(x))
    (said,) = warnings(caplog)
    assert "aten.sin.default" in said
    assert "fake_fading: a call raised: RuntimeError: the device is gone" in said


def test_what_moves_in_a_call_is_an_error_then_and_in_every_later_call(fading: Any) -> None:
    call, x = compiled(torch.sin, **FADING, fallback={"on_excess": "error"}), torch.rand(3)
    torch.testing.assert_close(call(x), torch.sin(x))
    fading(torch.ops.aten.sin.default)
    for _ in range(2):
        with pytest.raises(FallbackError, match="the device is gone"):
            call(x)


def test_a_timeline_that_was_cleared_does_not_end_the_budget(fading: Any) -> None:
    call, x = compiled(torch.sin, **FADING, fallback={"on_excess": "error"}), torch.rand(3)
    call(x)
    omnicomp.timeline.clear()
    call(x)
    fading(torch.ops.aten.sin.default)
    with pytest.raises(FallbackError, match="the device is gone"):
        call(x)


def test_a_backward_that_moves_in_a_call_is_an_error_there(fading: Any) -> None:
    call = compiled(torch.sin, **FADING, fallback={"on_excess": "error"})
    call(torch.rand(3, requires_grad=True)).sum().backward()
    fading(torch.ops.aten.cos.default)
    out = call(torch.rand(3, requires_grad=True))
    with pytest.raises(FallbackError, match=r"\(backward\).*the device is gone"):
        out.sum().backward()


def test_a_graph_that_retreats_as_a_whole_counts_with_all_of_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("planted failure")

    monkeypatch.setattr("omnicomp.backend.pipeline.compile_parts", broken)
    with pytest.raises(FallbackError, match="5 operators run eager") as caught:
        compiled(fallback={"on_excess": "error"})(torch.rand(3, 4))
    assert "the compiler raised on the whole graph" in str(caught.value)
    assert "keep the operator out" in str(caught.value)


def test_a_warm_start_is_judged_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_keys.STORE, "_root", lambda: tmp_path / "keys")
    rules = {"aten.*": "eager"}

    def run(**options: Any) -> None:
        compiled(lowerings=rules, **options)(torch.rand(3, 4))

    with torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex):
        run(summary=False)
        omnicomp.timeline.clear()
        # A budget is no part of the key, so this is restored.
        with pytest.raises(FallbackError, match=r"aten\.topk\.default"):
            run(fallback={"on_excess": "error"})
        assert any(e.verdict == "hit" for e in current() if isinstance(e, Cache) and e.cache == "aot_autograd")


def test_a_backward_that_a_cache_restores_is_judged_with_its_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_keys.STORE, "_root", lambda: tmp_path / "keys")

    def run(**options: Any) -> None:
        call = compiled(torch.exp, lowerings={"aten.*": "eager"}, **options)
        call(torch.rand(3, requires_grad=True)).sum().backward()

    with torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex):
        run(summary=False)
        omnicomp.timeline.clear()
        with pytest.raises(FallbackError, match=r"aten\.mul\.Tensor .*\(backward\)"):
            run(fallback={"allow": ["aten.exp"], "on_excess": "error"})
        hits = [e.part for e in current() if isinstance(e, Cache) and (e.cache, e.verdict) == ("aot_autograd", "hit")]
        assert {"forward", "backward"} <= set(hits)


def test_what_the_project_acknowledges_is_quiet_and_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    Path("pyproject.toml").write_text(f'{ENTRY}reason = "no kernel yet"\nexpires = {TOMORROW}\n')
    compiled(fallback={"on_excess": "error"})(torch.rand(3, 4))
    compiled()(torch.rand(3, 4))
    assert warnings(caplog) == []


def test_what_is_not_acknowledged_is_told_beside_what_is(caplog: pytest.LogCaptureFixture) -> None:
    Path("pyproject.toml").write_text(f'{ENTRY}reason = "no kernel yet"\nexpires = {TOMORROW}\n')
    compiled(lambda x: program(x).cumsum(-1))(torch.rand(3, 4))
    (said,) = warnings(caplog)
    assert "1 of 6 operators run eager: aten.cumsum.default" in said
    assert "1 more are acknowledged" in said


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        ('reason = "no kernel yet"\nexpires = 2020-01-01', "expired on 2020-01-01"),
        (f"expires = {TOMORROW}", "has no reason"),
        ('reason = "no kernel yet"', "has no date"),
        ("reason = ", "is no TOML"),
    ],
)
def test_what_does_not_acknowledge_is_told_and_counts(
    rest: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    Path("pyproject.toml").write_text(f"{ENTRY}{rest}\n")
    with pytest.raises(FallbackError, match=r"aten\.topk"):
        compiled(fallback={"on_excess": "error"})(torch.rand(3, 4))
    compiled()(torch.rand(3, 4))
    told, line = warnings(caplog)  # the problem once, though both met it
    assert problem in told
    assert "1 of 5 operators run eager" in line


def test_what_the_budget_allows_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    compiled(fallback={"allow": ["aten.topk"], "max_nodes": 5})(torch.rand(3, 4))
    assert warnings(caplog) == []


def test_a_failure_to_judge_costs_the_judgement_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("planted failure")

    monkeypatch.setattr("omnicomp.runtime.fallback_limit._verdict", broken)
    x = torch.rand(3, 4)
    torch.testing.assert_close(compiled(fallback={"on_excess": "error"}, summary=False)(x), program(x))
    said = warnings(caplog)
    assert said
    assert all("whether a graph is within its fallback budget could not be recorded" in line for line in said)
