"""The report that a user holds: the data of `Report`, with a method for each view."""

import dataclasses
import shutil
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from omnicomp.audit.fold import fold as folded
from omnicomp.audit.model import Report
from omnicomp.audit.views import VIEWS, jsonform, rows, text
from omnicomp.audit.views.why import Why, why
from omnicomp.timeline import Event

__all__ = ["Audit", "fold"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Audit(Report):
    """What ran where, and why, for all graphs of a timeline; `str` and rich show it as text."""

    @classmethod
    def of(cls, report: Report) -> "Audit":
        """The same data, with the views."""
        return cls(**{field.name: getattr(report, field.name) for field in dataclasses.fields(report)})

    def summary(self) -> str:
        """One line: shares, attention, retreats, and whether what ran is what was planned."""
        return rows.summary(self)

    def to_text(self) -> str:
        """Plain text, 120 columns wide."""
        return VIEWS["text"](self)

    def to_json(self) -> str:
        """The JSON form that `docs/audit.md` describes."""
        return VIEWS["json"](self)

    def to_html(self) -> str:
        """One HTML file that needs nothing else."""
        return VIEWS["html"](self)

    def why(self, name: str) -> Why:
        """The whole chain of reasons about a module, operator, node, line, pass or option.

        Raises:
            ReportError: the report has nothing of that name.
        """
        return why(self, name)

    def stable(self) -> dict[str, Any]:
        """The JSON form without what differs between two runs of one program: times, artefacts, cache verdicts."""
        return jsonform.stable(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from text.renderables(self)

    def __str__(self) -> str:
        """The text, as wide as the terminal or `COLUMNS` says; 120 columns where there is neither."""
        return text.to_text(self, shutil.get_terminal_size((120, 24)).columns)

    def __repr__(self) -> str:
        return self.summary()


def fold(events: Iterable[Event], *, skipped: int = 0) -> Audit:
    """Make the report from events in the order in which they were recorded; none of them is held on to.

    Args:
        events: of one process, or of several whose graphs have different ids.
        skipped: lines of the file that were torn.
    """
    return Audit.of(folded(events, skipped=skipped))
