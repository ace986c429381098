"""The report that a user holds: the data of `Report`, with a method for each view."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from omnicomp.audit.fold import fold as folded
from omnicomp.audit.model import Report
from omnicomp.audit.views import VIEWS, jsonform, rows, text
from omnicomp.audit.views.layout import plain
from omnicomp.audit.views.why import Why, why
from omnicomp.timeline import Event
from omnicomp.timeline.recorder import run_id


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Audit(Report):
    """What ran where, and why, for all graphs of a timeline.

    `print` shows what can be changed and a short table, as wide as the terminal; `to_text` has everything.
    """

    @classmethod
    def of(cls, report: Report) -> "Audit":
        """The same data, with the views."""
        return cls(**{field.name: getattr(report, field.name) for field in dataclasses.fields(report)})

    def summary(self) -> str:
        """One line: shares, attention, retreats, and whether what ran is what was planned."""
        return rows.summary(self)

    def to_text(self) -> str:
        """Plain text, 120 columns wide: every row, and tables of passes, assumptions, options and caches."""
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
        """What can be changed and a short table, as wide as the terminal or `COLUMNS` says, else 120 columns."""
        return plain(*text.renderables(self), width=None)

    def __repr__(self) -> str:
        return self.summary()


def fold(
    events: Iterable[Event], *, skipped: int = 0, states: Mapping[str, str] | None = None, whole: bool = False
) -> Audit:
    """Make the report from events in the order in which they were recorded; none of them is held on to."""
    states = {run_id(): "running"} if states is None else states
    return Audit.of(folded(events, skipped=skipped, states=states, whole=whole))
