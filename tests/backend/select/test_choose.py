"""Lowerings that are chosen by measuring: who wins, why the others lost, and what a later process does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rival_engines
import torch
from rival_engines import Changeable, Rival, Slow
from torch import nn

import omnicomp
from omnicomp.backend.select import contest as duels
from omnicomp.errors import OptionError
from omnicomp.timeline import Candidate, Event, Option, Ran, Subgraph

SLOW_FIRST = ("slow", "rival")


@pytest.fixture(autouse=True)
def rivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMNICOMP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(duels.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    with rival_engines.declared():
        yield
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.second(torch.relu(self.first(x))), -1)


def compiled(model: nn.Module, candidates: tuple[str, ...] = SLOW_FIRST, **options: Any) -> Any:
    torch._dynamo.reset()
    settings = {"lowerings": "measure", "candidates": candidates, "measure_seconds": 0.2, **options}
    return torch.compile(model, backend="omni", options=settings)


def run(model: nn.Module, candidates: tuple[str, ...] = SLOW_FIRST, **options: Any) -> dict[str, Candidate]:
    """Compile and call a model without gradients; returns the candidates by name, and looks at the value."""
    since, x = len(omnicomp.timeline.events()), torch.randn(4, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, candidates, **options)(x), model(x))
    return {event.candidate: event for event in events(Candidate, since)}


def events(kind: type[Event], since: int) -> list[Any]:
    return [event for event in omnicomp.timeline.events()[since:] if isinstance(event, kind)]


def test_the_faster_one_is_chosen_and_runs() -> None:
    since = len(omnicomp.timeline.events())
    found = run(Model().eval())
    assert found["rival"].selected
    assert found["rival"].speed > 2
    assert found["rival"].seconds < found["slow"].seconds
    assert not found["slow"].selected
    assert found["slow"].reason is not None
    assert found["slow"].reason.code == "slower"
    assert {event.lowering for event in events(Ran, since)} == {"rival"}


def test_what_lost_leaves_no_trace_but_its_candidate() -> None:
    since = len(omnicomp.timeline.events())
    run(Model().eval())
    assert {event.lowering for event in events(Subgraph, since)} == {"rival"}


def test_the_first_stays_where_nothing_is_faster() -> None:
    found = run(Model().eval(), ("rival", "slow"))
    assert found["rival"].selected
    assert found["slow"].speed < 0.5


def test_a_wrong_one_loses_however_fast_it_is() -> None:
    found = run(Model().eval(), ("slow", "wrong"))
    assert found["slow"].selected
    reason = found["wrong"].reason
    assert reason is not None
    assert reason.code == "verification_failed"


def test_one_that_can_not_be_built_is_out_with_its_reason() -> None:
    found = run(Model().eval(), ("rival", "unbuildable"))
    reason = found["unbuildable"].reason
    assert reason is not None
    assert "no such kernel" in reason.sentence


def test_one_that_is_not_installed_is_out() -> None:
    found = run(Model().eval(), ("rival", "absent", "slow"))
    reason = found["absent"].reason
    assert reason is not None
    assert reason.code == "engine_missing"
    assert "install the package absent" in reason.sentence


def test_a_later_compilation_does_not_measure_again() -> None:
    model = Model().eval()
    run(model)
    Slow.built = Slow.calls = 0
    found = run(model)
    assert {event.source for event in found.values()} == {"kept"}
    assert found["rival"].selected
    assert (Slow.built, Slow.calls) == (0, 0)


@pytest.mark.parametrize("verdicts", ["forget", pytest.param("off", marks=pytest.mark.slow)])
def test_it_measures_again_if_it_is_told_to(verdicts: str) -> None:
    model = Model().eval()
    run(model)
    assert {event.source for event in run(model, verdicts=verdicts).values()} == {"measured"}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", marks=pytest.mark.slow),
        pytest.param(b"{", marks=pytest.mark.slow),
        pytest.param(b'{"winner": 1}', marks=pytest.mark.slow),
        pytest.param(b"\xff\xfe", marks=pytest.mark.slow),
        b'{"schema":1,"key":"KEY","value":{"winner":"x","rules":3,"candidates":[]}}',
    ],
)
def test_a_damaged_file_is_measured_anew(content: bytes, tmp_path: Path) -> None:
    model = Model().eval()
    run(model)
    files = list((tmp_path / "choices").iterdir())
    assert files
    for file in files:
        file.write_bytes(content.replace(b"KEY", file.stem.encode()))
    assert {event.source for event in run(model).values()} == {"measured"}


def test_other_weights_are_the_same_graph_and_another_shape_is_not() -> None:
    run(Model().eval())
    assert {event.source for event in run(Model().eval()).values()} == {"kept"}
    model, since = Model().eval(), len(omnicomp.timeline.events())
    with torch.no_grad():
        compiled(model)(torch.randn(7, 8))
    assert {event.source for event in events(Candidate, since)} == {"measured"}


def test_random_numbers_are_those_of_a_program_without_measuring() -> None:
    model, x = Model().eval(), torch.randn(4, 8)
    torch.manual_seed(3)
    with torch.no_grad():
        compiled(model)(x)
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(3))


def test_what_a_graph_writes_to_is_written_once() -> None:
    class Counting(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return super().forward(x) * self.count

    model, since = Counting().eval(), len(omnicomp.timeline.events())
    run = compiled(model)
    with torch.no_grad():
        run(torch.randn(4, 8))
        assert model.count == 1
        run(torch.randn(4, 8))
        assert model.count == 2
    assert events(Candidate, since)


def test_a_training_step_is_right_and_goes_by_rule() -> None:
    model, x, since = Model(), torch.randn(4, 8), len(omnicomp.timeline.events())
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    found = torch.autograd.grad(compiled(model, ("eager", "rival"))(x).square().sum(), list(model.parameters()))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
    told = [event for event in events(Option, since) if event.key == "lowerings" and event.reason is not None]
    assert "training" in told[0].reason.sentence
    assert not events(Candidate, since)


def test_a_part_goes_elsewhere_where_that_makes_the_whole_faster() -> None:
    """`changeable` is the faster one, but not for the part with tanh, which is left to eager then."""

    class Parted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

    since = len(omnicomp.timeline.events())
    found = run(Parted().eval(), ("changeable", "rival"))
    assert found["rival"].selected, "the whole is faster without the slow part"
    assert Changeable.built
    assert {event.lowering for event in events(Ran, since)} == {"rival"}


def test_a_weight_that_changes_after_measuring_is_not_stale() -> None:
    model, x = Model().eval(), torch.randn(4, 8)
    run = compiled(model)
    with torch.no_grad():
        run(x)
        model.first.weight.mul_(3)
        torch.testing.assert_close(run(x), model(x))
        model.second.load_state_dict(nn.Linear(8, 8).state_dict())
        torch.testing.assert_close(run(x), model(x))
    assert Rival.calls


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"lowerings": "mesure"}, "mesure"),
        ({"lowerings": "measure", "candidates": ["rival"]}, "two names"),
        ({"lowerings": "measure", "candidates": ["rival", "nobody"]}, "nobody"),
        ({"lowerings": "measure", "measure_seconds": 0}, "measure_seconds"),
        ({"lowerings": "measure", "measure_seconds": None}, "measure_seconds"),
    ],
)
def test_wrong_options_get_one_sentence(value: dict[str, Any], said: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(OptionError, match=said):
        torch.compile(Model(), backend="omni", options=value)(torch.randn(4, 8))
