"""What ran where, and why: a report made from the timeline after the fact."""

from collections.abc import Iterable
from os import PathLike

from omnicomp.audit.builder import build
from omnicomp.audit.model import AUDIT_SCHEMA, Audit, Fallback, GraphAudit, PartAudit, Sites, SubgraphAudit
from omnicomp.audit.source import read
from omnicomp.timeline import Event, current

__all__ = [
    "AUDIT_SCHEMA",
    "Audit",
    "Fallback",
    "GraphAudit",
    "PartAudit",
    "Sites",
    "SubgraphAudit",
    "audit",
    "build",
]


def audit(source: str | PathLike[str] | Iterable[Event] | None = None) -> Audit:
    """Make the report.

    Args:
        source: None for this process' timeline, the path of a JSON Lines timeline, or events.

    Raises:
        TimelineError: the file is missing, unreadable, or no timeline.
    """
    if source is None:
        return build(current().events())
    if isinstance(source, (str, PathLike)):
        return build(read(source))
    return build(source)
