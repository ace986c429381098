"""Three levels for each subgraph, as backend runtimes record them: compile, kernel_override, eager.

It is made from what happened: an attempt is only there once the build was really tried, because torch.compile is
lazy and a record made when a module is wrapped would say "compile ok" before anything was compiled.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final

from omnicomp import records
from omnicomp.timeline.events import Attempt, Capture, Event

LEVELS: Final[dict[str, str]] = {
    "inductor": "compile",
    "device": "compile",
    "override": "kernel_override",
    "eager": "eager",
}
"""The level of each lowering; that of a compiler which is not among them, such as an engine, is `compile`."""


@records.dataclass(frozen=True, kw_only=True)
class LevelAttempt:
    """What became of one level.

    Attributes:
        level: `compile`, `kernel_override` or `eager`.
        ok: whether it could serve the subgraph, as far as it was tried.
        selected: whether it does.
        reason: why not; None for the selected one. What each of several compilers said that were asked in vain.
    """

    level: str
    ok: bool
    selected: bool
    reason: str | None = None


@records.dataclass(frozen=True, kw_only=True)
class ModuleLevels:
    """The three levels of one subgraph.

    Attributes:
        module: the tag of the module that it belongs to (`omnicomp.wrap_module`, or the option `tag`), else the id of
            the subgraph. A module of several graphs, or with a backward, has an entry for each subgraph.
        subgraph: id of the subgraph.
        attempts: compile, kernel_override and eager, in this order; exactly one is selected, unless every level failed.
    """

    module: str
    subgraph: str
    attempts: tuple[LevelAttempt, ...] = ()


def backend_timeline(events: Iterable[Event]) -> list[dict[str, Any]]:
    """One entry a subgraph, as `ModuleLevels` in plain data: `{"module", "subgraph", "attempts": [{…}, …]}`."""
    tags: dict[str, str] = {}
    by_subgraph: dict[str, list[Attempt]] = {}
    for event in events:
        if isinstance(event, Capture):
            tags[event.graph] = tag_of(event.options)
        elif isinstance(event, Attempt):
            by_subgraph.setdefault(event.subgraph, []).append(event)
    found = [levels_of(id, tags.get(each[0].graph, ""), each) for id, each in by_subgraph.items()]
    return [{**dataclasses.asdict(entry), "attempts": list(map(dataclasses.asdict, entry.attempts))} for entry in found]


def tag_of(options: Mapping[str, Any]) -> str:
    """The tag that a graph was compiled under, by what was passed in `options`; empty if none."""
    return str(options.get("tag") or "")


def levels_of(subgraph: str, tag: str, attempts: Iterable[Attempt]) -> ModuleLevels:
    """The levels of one subgraph by the attempts to build it, in their order."""
    last = {attempt.lowering: attempt for attempt in attempts}
    levels: dict[str, list[Attempt]] = {level: [] for level in LEVELS.values()}
    for lowering, attempt in last.items():
        levels[LEVELS.get(lowering, "compile")].append(attempt)
    chosen = {level: next((each for each in found if each.selected), None) for level, found in levels.items()}
    selected = next((level for level, attempt in chosen.items() if attempt is not None), None)
    entries: list[LevelAttempt] = []
    for level, found in levels.items():
        attempt = chosen[level]
        given = [str(each.reason) for each in found if each.reason] or [each.skipped for each in found if each.skipped]
        if attempt is not None:
            entries.append(LevelAttempt(level=level, ok=attempt.ok, selected=True))
        elif found:
            ok = any(each.ok for each in found)
            entries.append(LevelAttempt(level=level, ok=ok, selected=False, reason="; ".join(given) or None))
        else:
            reason = f"skipped: {selected} selected" if selected else "not tried"
            entries.append(LevelAttempt(level=level, ok=False, selected=False, reason=reason))
    return ModuleLevels(module=tag or subgraph, subgraph=subgraph, attempts=tuple(entries))
