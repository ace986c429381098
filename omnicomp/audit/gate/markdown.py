"""The verdict as Markdown for a comment on a pull request; details are folded."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from omnicomp.audit.gate.verdict import STATES, Line, Verdict, bounds, levers, lines, notes, why
from omnicomp.audit.views.rows import missing, percent, plural, short_source, summary
from omnicomp.safety.escapes import code, markdown

# A comment on GitHub has room for 65536 characters.
_ROWS: Final = 20
_FOLDED: Final = 30
_LONGEST: Final = 400
_ROOM: Final = 60_000


def to_markdown(verdicts: Sequence[Verdict]) -> str:
    """The verdicts on one or several reports."""
    # Of many reports there is room for the headlines, or for their number.
    headlines = (line for verdict in verdicts for line in (_headline(verdict, named=True), ""))
    for found in (_all(verdicts), headlines):
        text = _within_room(found)
        if text is not None:
            return text
    over, ended = (sum(found) for found in zip(*((v.over, not v.is_unfinished) for v in verdicts), strict=True))
    unfinished = f", and {len(verdicts) - ended} unfinished" if ended < len(verdicts) else ""
    return f"**omnicomp:** {over} of {len(verdicts)} reports are over the fallback budget{unfinished}.\n"


def _within_room(found: Iterator[str]) -> str | None:
    shown: list[str] = []
    room = _ROOM + 1
    for line in found:
        shown.append(line)
        room -= len(line) + 1
        if room < 0:
            return None
    return "\n".join(shown)


def _all(verdicts: Sequence[Verdict]) -> Iterator[str]:
    for verdict in verdicts:
        yield from _one(verdict, named=len(verdicts) > 1)
    found = notes(verdicts)
    if found:
        yield from ("**Acknowledgements**", "")
        yield from (f"- {_cut(note)}" for note in found[:_ROWS])
        yield ""


def _headline(verdict: Verdict, *, named: bool) -> str:
    name = f" {code(verdict.name)}" if named and verdict.name else ""
    return f"**omnicomp:{name} {verdict.headline}:** {markdown(', '.join(bounds(verdict)))}"


def _one(verdict: Verdict, *, named: bool) -> Iterator[str]:
    yield from (_headline(verdict, named=named), "")
    lacking = missing(verdict.audit)
    yield from (f"- {_cut(line)}" for line in lacking)
    yield from ("",) if lacking else ()
    counted = lines(verdict.counted)
    if counted:
        yield from ("| runs eager | where | why | to change this |", "|---|---|---|---|")
        for line in counted[:_ROWS]:
            reasons = line.first.reasons
            cells = (
                code(line.what),
                _where(line),
                _cut(why(reasons)) or "no reason was recorded",
                _cut(levers(reasons)),
            )
            yield f"| {' | '.join(cells)} |"
        yield from ("", f"and {len(counted) - _ROWS} more", "") if len(counted) > _ROWS else ("",)
    mismatches = verdict.audit.mismatches
    for row in mismatches[:_ROWS]:
        yield f"- {code(row.id)} did not run as planned: {_cut(row.difference)}"
    yield from ("",) if mismatches else ()
    rest = lines(item for item in verdict.fallen if item.state != "counts")
    if rest:
        yield from _folded(
            f"On eager without counting: {plural(sum(line.nodes for line in rest), 'operator')}", _rest(rest)
        )
    yield from _folded("The whole report in a line", [markdown(summary(verdict.audit)), "", *_shares(verdict)])


def _rest(rest: Sequence[Line]) -> Iterator[str]:
    yield from ("| runs eager | where | does not count, as |", "|---|---|---|")
    for line in rest[:_FOLDED]:
        state, because = STATES[line.first.state], line.first.why
        yield f"| {code(line.what)} | {_where(line)} | {state}{f': {_cut(because)}' if because else ''} |"
    if len(rest) > _FOLDED:
        yield from ("", f"and {len(rest) - _FOLDED} more")


def _shares(verdict: Verdict) -> Iterator[str]:
    bases = {basis: shares for basis, shares in verdict.audit.shares_by.items() if shares}
    if not bases:
        return
    yield from (
        f"| share of | {' | '.join(map(markdown, _lowerings(verdict)))} |",
        f"|---|{'---:|' * len(_lowerings(verdict))}",
    )
    for basis, shares in bases.items():
        cells = [percent(shares.get(lowering, 0.0)) for lowering in _lowerings(verdict)]
        yield f"| {basis} | {' | '.join(cells)} |"


def _lowerings(verdict: Verdict) -> list[str]:
    found = {name: None for shares in verdict.audit.shares_by.values() for name in shares}
    return list(found)[:_ROWS]


def _folded(title: str, body: Iterable[str]) -> Iterator[str]:
    yield from ("<details>", f"<summary>{title}</summary>", "", *body, "", "</details>", "")


def _where(line: Line) -> str:
    return code(line.where(map(short_source, line.places)).strip().removeprefix("at ").removeprefix("in "))


def _cut(text: str) -> str:
    return markdown(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…")
