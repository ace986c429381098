"""What a compilation tells of its stages, and that it changes nothing of them."""

import pytest
import torch
from torch._dynamo.utils import compilation_time_metrics

from omnicomp.passes import PIPELINE
from omnicomp.timeline import activity as module
from omnicomp.timeline import progress_line as progress
from omnicomp.timeline.activity import activity


def test_stages_are_in_torchs_compile_times() -> None:
    compilation_time_metrics.clear()
    torch.compile(lambda x: x.sin(), backend="omni", options={"lowerings": ["eager"]})(torch.ones(2))
    counts = {name: len(times) for name, times in compilation_time_metrics.items() if name.startswith("omnicomp.")}
    assert counts["omnicomp.compile"] == counts["omnicomp.part"] == counts["omnicomp.build"] == 1
    assert counts["omnicomp.pass"] == len(PIPELINE)


@pytest.mark.inductor
def test_a_part_of_inductors_is_inside_of_autograd() -> None:
    compilation_time_metrics.clear()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(lambda x: x.sin() * 2, backend="omni")(torch.ones(2))
    (autograd,), (build,) = (compilation_time_metrics[f"omnicomp.{name}"] for name in ("autograd", "build"))
    assert 0 < build < autograd


def test_an_error_passes_through_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(module.structured_trace, "flush", lambda: flushed.append(1))
    error = ValueError("boom")

    def failing() -> None:
        with activity("compile", "a graph") as outer:
            outer.say("g0", graph="g0")
            with activity("build", "inner", graph="g0"):
                raise error

    with pytest.raises(ValueError, match="boom") as caught:
        failing()
    assert caught.value is error
    assert flushed == [1], "the trace is written at the end of the outermost"
    assert not progress._state.steps


def test_the_option_hides_what_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []
    original = progress.step

    def step(text: str, *, shown: bool = True) -> object:
        seen.append((text, shown))
        return original(text, shown=shown)

    monkeypatch.setattr(progress, "step", step)
    for shown in (True, False):
        seen.clear()
        options = {"lowerings": ["eager"], "progress": shown}
        torch.compile(lambda x: x.sin(), backend="omni", options=options)(torch.ones(2))
        assert {flag for _, flag in seen} == {shown}
        assert any(text.startswith("eager builds g") for text, _ in seen)
        torch.compiler.reset()
