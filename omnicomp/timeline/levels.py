"""Three levels for each subgraph, as backend runtimes record them: compile, kernel_override, eager.

It is made from what happened: an attempt is only there once the build was really tried, because torch.compile is
lazy and a record made when a module is wrapped would say "compile ok" before anything was compiled.
"""

from collections.abc import Iterable
from typing import Any, Final

from omnicomp.timeline.events import Attempt, Event

__all__ = ["LEVELS", "backend_timeline"]

LEVELS: Final[dict[str, str]] = {
    "inductor": "compile",
    "device": "compile",
    "override": "kernel_override",
    "eager": "eager",
}
"""The level of each lowering; that of a compiler which is not among them, such as an engine, is `compile`."""


def backend_timeline(events: Iterable[Event]) -> list[dict[str, Any]]:
    """One entry a subgraph: `{"module": id, "attempts": [{"level", "ok", "selected", "reason"}, …]}`.

    The attempts are in the order compile, kernel_override, eager, each level once; exactly one is selected, unless
    every level failed. The reason is None for the selected attempt; where several compilers were asked in vain, it
    has what each of them said.
    """
    by_subgraph: dict[str, dict[str, Attempt]] = {}
    for event in events:
        if isinstance(event, Attempt):
            # The last word on a lowering stands: a retreat records it again.
            by_subgraph.setdefault(event.subgraph, {})[event.lowering] = event
    return [{"module": subgraph, "attempts": _entries(attempts)} for subgraph, attempts in by_subgraph.items()]


def _entries(attempts: dict[str, Attempt]) -> list[dict[str, Any]]:
    levels: dict[str, list[Attempt]] = {level: [] for level in LEVELS.values()}
    for lowering, attempt in attempts.items():
        levels[LEVELS.get(lowering, "compile")].append(attempt)
    chosen = {level: next((each for each in found if each.selected), None) for level, found in levels.items()}
    selected = next((level for level, attempt in chosen.items() if attempt is not None), None)
    entries: list[dict[str, Any]] = []
    for level, found in levels.items():
        attempt = chosen[level]
        given = [str(each.reason) for each in found if each.reason] or [each.skipped for each in found if each.skipped]
        if attempt is not None:
            entries.append({"level": level, "ok": attempt.ok, "selected": True, "reason": None})
        elif found:
            ok = any(each.ok for each in found)
            entries.append({"level": level, "ok": ok, "selected": False, "reason": "; ".join(given) or None})
        else:
            reason = f"skipped: {selected} selected" if selected else "not tried"
            entries.append({"level": level, "ok": False, "selected": False, "reason": reason})
    return entries
