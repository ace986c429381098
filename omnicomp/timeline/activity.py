"""One context manager for a stage of a compilation: progress line, torch's compile times, telemetry."""

import contextlib
import threading
from collections.abc import Generator
from typing import Any

from omnicomp._torch.inductor.current_wait import waits_for
from omnicomp._torch.structured import timed
from omnicomp.timeline import progress_line
from omnicomp.timeline.sinks import opentelemetry, structured_trace

progress_line.waits_for = waits_for

_local = threading.local()


class Activity:
    """A stage under way."""

    def __init__(self, step: progress_line.Step, span: Any) -> None:
        self._step = step
        self._span = span

    def say(self, text: str, **attributes: Any) -> None:
        """Change the text of the progress line, and add attributes to the span."""
        self._step.say(text)
        opentelemetry.describe(self._span, attributes)


@contextlib.contextmanager
def activity(name: str, text: str, *, shown: bool = True, **attributes: Any) -> Generator[Activity]:
    """Mark a stage of a compilation.

    It is a step of the progress line, a range `omnicomp.<name>` in torch's compile times, in tlparse's time line and in
    the profiler, and a span of that name for OpenTelemetry. At the end of the outermost one, the structured trace gets
    what the timeline was told meanwhile.

    Returns:
        The activity, to say more once it is known.
    """
    outer = getattr(_local, "depth", 0)
    _local.depth = outer + 1
    full = f"omnicomp.{name}"
    try:
        with (
            progress_line.step(text, shown=shown) as step,
            opentelemetry.span(full, attributes) as span,
            timed(full, **attributes),
        ):
            yield Activity(step, span)
    finally:
        _local.depth = outer
        if not outer and name != "pass":  # what passes decided is told to the timeline behind the last of them
            structured_trace.flush()
