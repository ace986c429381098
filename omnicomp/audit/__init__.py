"""What ran where, and why: a report made from the timeline after the fact."""

from collections.abc import Iterable
from os import PathLike

from omnicomp.audit.diff.compare import compare
from omnicomp.audit.diff.report import AuditDiff, Change, Measure
from omnicomp.audit.model import (
    AUDIT_SCHEMA,
    Environment,
    Fallback,
    GraphAudit,
    MemoryUse,
    Merge,
    PartAudit,
    Setting,
    Shares,
    Sites,
    SubgraphAudit,
    TimeUse,
)
from omnicomp.audit.report import Audit, fold
from omnicomp.audit.source import load
from omnicomp.audit.views.why import Why, why
from omnicomp.timeline import Event, current

__all__ = [
    "AUDIT_SCHEMA",
    "Audit",
    "AuditDiff",
    "Change",
    "Environment",
    "Fallback",
    "GraphAudit",
    "Measure",
    "MemoryUse",
    "Merge",
    "PartAudit",
    "Setting",
    "Shares",
    "Sites",
    "SubgraphAudit",
    "TimeUse",
    "Why",
    "audit",
    "build",
    "diff",
    "fold",
    "load",
    "why",
]

build = fold

Source = str | PathLike[str] | Iterable[Event] | None


def audit(source: Source = None) -> Audit:
    """Make a report.

    Args:
        source: None for this process' timeline; the path of a JSON Lines timeline, or of a report that was written as
            JSON; or events.

    Raises:
        TimelineError: the file is missing, unreadable, or no timeline.
        ReportError: the file is a report that can't be read, or of a newer version.
    """
    if source is None:
        return build(current().events())
    if isinstance(source, (str, PathLike)):
        return load(source)
    return build(source)


def diff(
    before: Source | Audit,
    after: Source | Audit,
    *,
    time_threshold: float | None = None,
    memory_threshold: float | None = None,
) -> AuditDiff:
    """Find what differs between two runs.

    Args:
        before: a report, or what `audit` makes one of.
        after: likewise.
        time_threshold: relative growth of compile time or of calls beyond which they differ; None: times are shown
            only.
        memory_threshold: likewise of memory.

    Raises:
        TimelineError: a file is missing, unreadable, or no timeline.
        ReportError: a file is a report that can't be read, or of a newer version.
    """
    one = before if isinstance(before, Audit) else audit(before)
    other = after if isinstance(after, Audit) else audit(after)
    return compare(one, other, time_threshold=time_threshold, memory_threshold=memory_threshold)


# `omnicomp.audit` is this function in a program that imports omnicomp alone; `omnicomp.audit.diff` has to work there.
audit.diff = diff  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
