"""What ran where, and why: a report made from the timeline after the fact."""

from collections.abc import Iterable
from os import PathLike

import omnicomp.safety.rich_style  # noqa: F401 - before rich  # pyright: ignore[reportUnusedImport]
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
    ProcessAudit,
    Setting,
    Shares,
    Sites,
    SubgraphAudit,
    TimeUse,
    Unfinished,
)
from omnicomp.audit.report import Audit, fold
from omnicomp.audit.source import Recording, load, of_this_process, record
from omnicomp.audit.views.why import Why, why
from omnicomp.errors import OptionError, nearest
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
    "ProcessAudit",
    "Recording",
    "Setting",
    "Shares",
    "Sites",
    "SubgraphAudit",
    "TimeUse",
    "Unfinished",
    "Why",
    "audit",
    "build",
    "diff",
    "fold",
    "load",
    "record",
    "why",
]

build = fold

SCOPES = ("reset", "process")
"""What `audit` takes as the scope of a report of this process."""

Source = str | PathLike[str] | Iterable[Event] | None


def audit(source: Source = None, *, scope: str = "reset") -> Audit:
    """Make a report.

    Args:
        source: None for this process' timeline; the path of a JSON Lines timeline, or of a report that was written as
            JSON; or events.
        scope: how much of this process' timeline: `reset` for the graphs that were captured since the last
            `torch.compiler.reset()` or `torch._dynamo.reset()`, `process` for all; `omnicomp.record` gives what a block
            of code compiles.

    Raises:
        OptionError: the scope is unknown.
        TimelineError: the file is missing, unreadable, or no timeline.
        ReportError: the file is a report that can't be read, or of a newer version.
    """
    if scope not in SCOPES:
        raise OptionError(f"scope takes {' or '.join(map(repr, SCOPES))}, not {scope!r}{nearest(str(scope), SCOPES)}")
    if source is None:
        return of_this_process(current().since_reset() if scope == "reset" else current().events())
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
