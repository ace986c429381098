"""The option `ranges`: calls of subgraphs as ranges of torch's profiler."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from omnicomp.devices import resolve_device
from omnicomp.lowerings import GraphRecord, LoweringContext
from omnicomp.options.policy import parse
from omnicomp.runtime import profiler_ranges
from omnicomp.timeline import Timeline


def names(call: object) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()  # type: ignore[operator]
    return sorted({event.name for event in found.events() if event.name.startswith("omni ")})


def step(compiled: object, x: torch.Tensor) -> None:
    compiled(x).sum().backward()  # type: ignore[operator]


def test_each_subgraph_of_forward_and_backward_is_a_range() -> None:
    options = {"ranges": True, "lowerings": {"aten.sin": ["eager"], "*": ["eager"]}}
    compiled = torch.compile(lambda x: (x.sin() + 1).sum(), backend="omni", options=options)
    x = torch.ones(3, requires_grad=True)
    step(compiled, x)
    (first, second) = names(lambda: step(compiled, x))
    assert first.startswith("omni g")
    assert first.endswith(".backward.0 (eager)")
    assert second.endswith(".forward.0 (eager)")


@pytest.mark.inductor
def test_whole_parts_and_pieces_of_inductor_are_ranges_cold_and_warm() -> None:
    options = {"ranges": True, "lowerings": {"aten.digamma": ["eager"]}}

    def cut(x: torch.Tensor) -> torch.Tensor:
        return (x.exp() + 1).digamma().sin() * 2

    for _ in range(2):
        torch.compiler.reset()
        whole = torch.compile(lambda x: x.exp() + 3, backend="omni", options={"ranges": True})
        pieces = torch.compile(cut, backend="omni", options=options)
        for call in (whole, pieces):
            call(torch.ones(5))
        assert [name.split(".", 1)[1] for name in names(lambda: whole(torch.ones(5)))] == ["inference.0 (inductor)"]  # noqa: B023
        assert [name.split(".", 1)[1] for name in names(lambda: pieces(torch.ones(5)))] == [  # noqa: B023
            "inference.0 (inductor)",
            "inference.1 (eager)",
            "inference.2 (inductor)",
        ]


def test_without_the_option_the_callable_is_the_same() -> None:
    context = LoweringContext(
        graph=GraphRecord(id="g0"),
        part="forward",
        device=resolve_device("cpu"),
        policy=parse(None, {}),
        timeline=Timeline(),
    )

    def call(inputs: list[object]) -> list[object]:
        return inputs

    assert profiler_ranges.named(call, context, "g0.forward.0") is call
    compiled = torch.compile(lambda x: x + 1, backend="omni", options={"lowerings": ["eager"]})
    compiled(torch.ones(2))
    assert names(lambda: compiled(torch.ones(2))) == []
