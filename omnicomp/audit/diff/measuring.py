"""Times and memory of two runs side by side, and which of them are beyond a threshold."""

from collections.abc import Iterator, Sequence

from omnicomp.audit.diff.changes import Change, Measure
from omnicomp.audit.model import Audit

__all__ = ["measures", "over_threshold"]


def measures(before: Audit, after: Audit) -> tuple[Measure, ...]:
    """What was measured in both runs."""
    one, other = _measured(before), _measured(after)
    return tuple(
        Measure(name=name, unit=unit, before=one[name, unit], after=other[name, unit])
        for name, unit in one
        if (name, unit) in other
    )


def over_threshold(
    measured: Sequence[Measure], time_threshold: float | None, memory_threshold: float | None
) -> Iterator[Change]:
    """The measures that grew by more than is allowed."""
    limits = {"s": ("time", time_threshold), "bytes": ("memory", memory_threshold)}
    for measure in measured:
        kind, limit = limits.get(measure.unit, ("", None))
        growth = measure.growth
        if limit is None or growth is None or growth <= limit:
            continue
        yield Change(
            kind=kind,
            what=measure.name,
            sentence=f"{measure.name} grew by {100 * growth:.0f} %, and {100 * limit:g} % are allowed",
            before=shown(measure.before, measure.unit),
            after=shown(measure.after, measure.unit),
        )


def shown(value: float, unit: str) -> str:
    """A measured value for a person: `1.25 s`, `12.0 MiB`, `3`."""
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"
    if unit == "bytes":
        return f"{value / 2**20:.1f} MiB"
    return f"{value:g}"


def _measured(audit: Audit) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    stages: dict[str, float] = {}
    for graph in audit.graphs:
        for name, seconds in graph.compile_seconds.items():
            stages[name] = stages.get(name, 0.0) + seconds
    if stages:
        found["compile", "s"] = sum(stages.values())
        found.update({(f"compile: {name}", "s"): seconds for name, seconds in stages.items()})
    timed = [row.timing for row in audit.subgraphs if row.timing is not None]
    if timed:
        found["one call of each subgraph", "s"] = sum(timing.fastest for timing in timed)
    peaks = [row.memory.peak_bytes for row in audit.subgraphs if row.memory is not None and row.memory.peak_bytes >= 0]
    if peaks:
        found["peak memory", "bytes"] = max(peaks)
    weights = [event.total for graph in audit.graphs for event in graph.weights]
    if weights:
        found["copies of weights", "bytes"] = max(weights)
    found["cache hits", ""] = sum(1 for graph in audit.graphs for cache in graph.caches if cache.verdict == "hit")
    return found
