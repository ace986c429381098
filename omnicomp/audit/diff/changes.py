"""What differs between two reports, as frozen dataclasses; `omnicomp.audit.diff.compare` finds it."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

from rich.console import Console, ConsoleOptions, RenderResult

from omnicomp.timeline import Reason

__all__ = ["DIFF_SCHEMA", "KINDS", "AuditDiff", "Change", "Measure"]

DIFF_SCHEMA: Final = 1

KINDS: Final[dict[str, str]] = {
    "fell_back": "runs eager now, though the policy has an earlier lowering",
    "mismatch": "did not run as planned, and no retreat says why",
    "wrong": "an override was found to compute something else than its reference",
    "retreat": "moved to another lowering after a failure",
    "recovered": "does not fall back to eager any more",
    "moved": "is on another lowering",
    "cut": "a part is cut otherwise",
    "appeared": "is there now",
    "disappeared": "is not there any more",
    "edited": "consists of other operators",
    "sizes": "was compiled for sizes of another class",
    "pass_stopped": "a pass rewrites fewer places",
    "pass_started": "a pass rewrites more places",
    "near_miss": "a pass left a candidate alone that it did not leave alone before",
    "near_miss_gone": "a candidate that a pass left alone is not there any more",
    "not_called": "was called in one of the two runs only",
    "option": "an option took effect with another value",
    "version": "another version",
    "device": "another device or platform",
    "time": "a time is beyond the threshold",
    "memory": "memory is beyond the threshold",
}
"""The kinds of changes, the most urgent first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that differs; equal ones of several places are one, with a count.

    Attributes:
        kind: a key of `KINDS`.
        what: the operator, subgraph, pass, option or software.
        sentence: what differs, in one sentence.
        graph: identity of the graph, or empty where it is about all.
        part: `forward`, `backward`, `inference`, or empty.
        before: how it was, as text; empty if it was not there.
        after: how it is, likewise.
        places: up to eight module paths, `file:line` or identities of subgraphs that it is about.
        count: how many places it is about.
        reasons: why it is as it is now, where that was recorded.
        significant: whether it makes the two reports different; names of machines do not.
    """

    kind: str
    what: str
    sentence: str
    graph: str = ""
    part: str = ""
    before: str = ""
    after: str = ""
    places: tuple[str, ...] = ()
    count: int = 1
    reasons: tuple[Reason, ...] = ()
    significant: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure:
    """Something measured in both runs; it differs from run to run, and so decides nothing without a threshold.

    Attributes:
        name: what: `compile`, `compile: dynamo`, …, `calls`, `peak memory`, `cache hits`.
        unit: `s`, `bytes` or empty.
        before: the first run's.
        after: the second run's.
    """

    name: str
    unit: str
    before: float
    after: float

    @property
    def growth(self) -> float | None:
        """How much more it is, as a part of what it was; None if it was nothing."""
        return self.after / self.before - 1 if self.before else None


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AuditDiff:
    """What differs between two reports.

    Attributes:
        before: the summary line of the first.
        after: the summary line of the second.
        changes: what differs, the most urgent first.
        measures: times and memory of both.
        time_threshold: growth of a time that is a change, as a part of what it was; None for none.
        memory_threshold: likewise of memory.
    """

    before: str
    after: str
    changes: tuple[Change, ...] = ()
    measures: tuple[Measure, ...] = ()
    time_threshold: float | None = None
    memory_threshold: float | None = None

    @property
    def differs(self) -> bool:
        """Whether anything differs that is not the machine's name."""
        return any(change.significant for change in self.changes)

    def of_kind(self, kind: str) -> Iterator[Change]:
        """The changes of a kind."""
        return (change for change in self.changes if change.kind == kind)

    def summary(self) -> str:
        """One line."""
        from omnicomp.audit.diff.views import summary

        return summary(self)

    def to_text(self) -> str:
        """Plain text, 120 columns wide."""
        from omnicomp.audit.diff.views import to_text

        return to_text(self)

    def to_json(self) -> str:
        """The JSON form that `docs/audit.md` describes."""
        from omnicomp.audit.diff.views import to_json

        return to_json(self)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form as plain dictionaries and lists."""
        from omnicomp.audit.diff.views import to_dict

        return to_dict(self)

    def to_markdown(self) -> str:
        """Markdown for a comment on a pull request."""
        from omnicomp.audit.diff.views import to_markdown

        return to_markdown(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from omnicomp.audit.diff.views import renderables

        yield from renderables(self)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return self.summary()
