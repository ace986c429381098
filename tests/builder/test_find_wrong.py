"""The node that Inductor gets wrong is named, and only it leaves: at run time, and in the next process at once."""

import dataclasses
from pathlib import Path

import pytest
import torch

import omnicomp
from omnicomp._torch.inductor import compile_fx
from omnicomp.builder import known_failures as verdicts
from omnicomp.builder.find_wrong import Finding, Suspects, blame
from omnicomp.lowerings.eager import EagerLowering
from omnicomp.lowerings.inductor import InductorLowering
from omnicomp.timeline import Reason

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


def run(function, x: torch.Tensor, **options) -> torch.Tensor:
    # A boundary in front of the first node makes pieces of the part, which the planted lowering builds.
    lowerings = {"aten.tanh": ["eager"], "*": ["inductor", "eager"]}
    options = {"summary": False, "verify": "first", "lowerings": dict(reversed(lowerings.items())), **options}
    return torch.compile(function, backend="omni", options=options)(x)


def test_the_guilty_node_is_named_and_the_rest_stays_compiled(pieces) -> None:
    x = torch.randn(6)
    torch.testing.assert_close(run(function, x), function(x))
    rows = {row.id.partition(".")[2]: row for row in omnicomp.audit().subgraphs}
    assert rows["inference.0"].ran == "inductor"
    child = rows["inference.0/sin"]
    assert (child.planned, child.ran, list(child.ops)) == ("inductor", "eager", ["aten.sin.default"])
    assert child.retreats[0].reason.code == "verification_failed"
    assert not omnicomp.audit().mismatches
    assert len(pieces) <= 8


def test_the_next_process_cuts_only_that_node(pieces, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6)
    run(function, x)
    assert verdicts.wrong_code()
    monkeypatch.setattr(verdicts, "_PROCESS", "another")
    torch.compiler.reset()
    omnicomp.timeline.clear()
    pieces.clear()
    torch.testing.assert_close(run(function, x, verify="off"), function(x))
    assert all("sin" not in names for names in pieces)
    eager = {name for row in omnicomp.audit().subgraphs if row.ran == "eager" for name in row.ops}
    assert eager == {"aten.sin.default", "aten.tanh.default"}


def test_sizes_that_are_symbolic_run_eager_and_the_node_is_named(pieces) -> None:
    x = torch.randn(6)
    torch._dynamo.mark_dynamic(x, 0)
    torch.testing.assert_close(run(function, x), function(x))
    (retreat,) = [e for e in omnicomp.timeline.events() if e.type == "retreat"]
    assert (retreat.subgraph.partition(".")[2], retreat.target_lowering) == ("inference.0", "eager")
    assert retreat.reason.node == "sin (aten.sin.default)"


def test_a_search_that_raises_leaves_eager_and_says_so(pieces, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args):
        raise ValueError("planted in the search")

    monkeypatch.setattr("omnicomp._torch.inductor.own_context.with_fixed_sizes", broken)
    x = torch.randn(6)
    torch.testing.assert_close(run(function, x), function(x))
    (retreat,) = [e for e in omnicomp.timeline.events() if e.type == "retreat"]
    assert "could not be looked for: ValueError: planted in the search" in retreat.reason.sentence


def test_inputs_that_a_call_may_write_to_are_copied_with_their_strides() -> None:
    graph = torch.fx.Graph()
    values = [graph.placeholder(name) for name in ("a", "b", "c")]
    graph.output(tuple(values))
    suspects = Suspects(torch.fx.GraphModule({}, graph), [], None, overwritten=frozenset({"b"}))  # type: ignore[arg-type]
    inputs = [torch.randn(2, 3), torch.randn(3, 2).t(), torch.randn(3, 1).expand(3, 4)]
    kept = suspects.keep(inputs, frozenset({2}))
    assert kept[0] is inputs[0]
    assert [k.stride() for k in kept] == [i.stride() for i in inputs]
    assert kept[1].data_ptr() != inputs[1].data_ptr() != kept[2].data_ptr() != inputs[2].data_ptr()
    torch.testing.assert_close(kept, inputs)


def test_the_reason_says_what_was_found() -> None:
    reason = Reason(code="verification_failed", sentence="wrong")
    assert "cut before mul" in blame(Finding(cut={}, boundaries=frozenset({"mul"})), reason).sentence
    assert blame(Finding(cut={}, note="nothing"), reason).sentence == "wrong; nothing"


@pytest.mark.inductor
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_lowering_that_computes_something_else(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import lowering

    op, other = torch.ops.aten.sin.default, torch.ops.aten.cos.default
    if part == "backward":
        op, other = other, op
    monkeypatch.setitem(lowering.lowerings, op, lowering.lowerings[other])
    # What is built wrongly here must not be found by other tests.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    x = torch.randn(8, requires_grad=True)
    function = lambda x: (x * 2).sin().sum()  # noqa: E731
    compiled = torch.compile(function, backend="omni", options={"verify": "first", "summary": False})
    torch.testing.assert_close(compiled(x), function(x))
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x), torch.autograd.grad(function(x), x))
    wrong = [row for row in omnicomp.audit().subgraphs if row.ran == "eager"]
    assert [(row.parent.split(".")[1], list(row.ops)) for row in wrong] == [(part, [str(op)])]
    assert compile_fx.cache_dir() == str(tmp_path / "inductor")
