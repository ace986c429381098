"""Three levels for each subgraph, as backend runtimes record them: compile, kernel_override, eager.

It is made from what happened: an attempt is only there once the build was really tried, because torch.compile is
lazy and a record made when a module is wrapped would say "compile ok" before anything was compiled.
"""

from collections.abc import Iterable
from typing import Any, Final

from omnicomp.timeline.events import Attempt, Event

__all__ = ["LEVELS", "backend_timeline"]

LEVELS: Final[dict[str, str]] = {"inductor": "compile", "override": "kernel_override", "eager": "eager"}


def backend_timeline(events: Iterable[Event]) -> list[dict[str, Any]]:
    """One entry a subgraph: `{"module": id, "attempts": [{"level", "ok", "selected", "reason"}, …]}`.

    The attempts are in the order compile, kernel_override, eager, each level once; exactly one is selected, unless
    every level failed. The reason is None for the selected attempt.
    """
    by_subgraph: dict[str, dict[str, Attempt]] = {}
    for event in events:
        if isinstance(event, Attempt):
            level = LEVELS.get(event.lowering, event.lowering)
            # The last word on a level stands: a retreat records the level again.
            by_subgraph.setdefault(event.subgraph, {})[level] = event
    return [{"module": subgraph, "attempts": _entries(attempts)} for subgraph, attempts in by_subgraph.items()]


def _entries(attempts: dict[str, Attempt]) -> list[dict[str, Any]]:
    selected = next((level for level, attempt in attempts.items() if attempt.selected), None)
    order = [*LEVELS.values(), *(level for level in attempts if level not in LEVELS.values())]
    entries: list[dict[str, Any]] = []
    for level in order:
        attempt = attempts.get(level)
        if attempt is None:
            reason = f"skipped: {selected} selected" if selected else "not tried"
            entries.append({"level": level, "ok": False, "selected": False, "reason": reason})
        else:
            reason = str(attempt.reason) if attempt.reason else (attempt.skipped or None)
            entries.append({"level": level, "ok": attempt.ok, "selected": attempt.selected, "reason": reason})
    return entries
