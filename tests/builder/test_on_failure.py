"""A subgraph that Inductor gets wrong runs eager, a script shows it, and the next process knows it at once."""

import dataclasses
from pathlib import Path

import pytest
import torch

import omnicomp
from omnicomp.builder import known_failures, on_failure
from omnicomp.lowerings.eager import EagerLowering
from omnicomp.lowerings.inductor import InductorLowering

WRONG = {torch.ops.aten.sin.default: torch.ops.aten.cos.default}


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What an Inductor was asked to build that takes the cosine where the sine was asked for; it computes by eager."""
    asked: list[list[str]] = []

    def lower(lowering, module, inputs, context):
        calls = [node for node in module.graph.nodes if node.op == "call_function"]
        asked.append([node.name for node in calls])
        for node in calls:
            node.target = WRONG.get(node.target, node.target)
        built = EagerLowering().lower(module, inputs, context)
        return dataclasses.replace(built, lowering="inductor")

    monkeypatch.setattr(InductorLowering, "lower", lower)
    return asked


def function(x: torch.Tensor) -> torch.Tensor:
    return ((x.exp() + 1).sin() * 2).tanh()


def run(x: torch.Tensor, **options) -> torch.Tensor:
    # A boundary in front of the last node makes pieces of the part, which the planted lowering builds.
    lowerings = {"*": ["inductor", "eager"], "aten.tanh": ["eager"]}
    options = {"summary": False, "verify": "first", "lowerings": lowerings, **options}
    return torch.compile(function, backend="omni", options=options)(x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_wrong_subgraph_runs_eager_and_the_lever_names_a_script(pieces, dynamic: bool) -> None:
    x = torch.randn(6)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    torch.testing.assert_close(run(x), function(x))
    (retreat,) = [e for e in omnicomp.timeline.events() if e.type == "retreat"]
    assert (retreat.subgraph.partition(".")[2], retreat.target_lowering) == ("inference.0", "eager")
    assert retreat.reason.code == "verification_failed"
    script = Path(retreat.reason.lever.partition("`omnicomp bisect ")[2].partition("`")[0])
    assert "torch.ops.aten.sin.default" in script.read_text()
    assert "accuracy=True" in script.read_text()
    assert not omnicomp.audit().mismatches


def test_the_next_process_does_not_give_it_to_inductor(pieces, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6)
    run(x)
    assert known_failures.wrong_code()
    monkeypatch.setattr(known_failures, "_PROCESS", "another")
    torch.compiler.reset()
    omnicomp.timeline.clear()
    pieces.clear()
    torch.testing.assert_close(run(x, verify="off"), function(x))
    assert pieces == []


def test_a_script_that_cannot_be_written_costs_the_script_alone(pieces, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args, **kwargs):
        raise ValueError("planted in the writer")

    monkeypatch.setattr(on_failure, "write_script", broken)
    x = torch.randn(6)
    torch.testing.assert_close(run(x), function(x))
    events = omnicomp.timeline.events()
    assert any("no script was written: ValueError: planted" in e.note for e in events if e.type == "cache")
    (retreat,) = [e for e in events if e.type == "retreat"]
    assert "bisect" not in retreat.reason.lever
