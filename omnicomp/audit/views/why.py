"""Lines of the user's source around a `file:line` of a report, read when a view is made.

A report may come from elsewhere, and what it names is not trusted: only Python files are read, and what looks like a
credential in them is hidden as it is in the timeline.
"""

import dataclasses
import fnmatch
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from omnicomp.audit.model import GraphAudit, PartAudit, Report, SubgraphAudit
from omnicomp.audit.views import rows
from omnicomp.audit.views.layout import Facts, plain
from omnicomp.audit.views.rows import percent, plural
from omnicomp.audit.views.tree import STYLES
from omnicomp.errors import ReportError, nearest
from omnicomp.safety.escapes import one_line, printable
from omnicomp.safety.privacy import cleaner
from omnicomp.timeline import CODES, NearMiss, NodePlacement, Reason
from omnicomp.timeline.reasons import RECOMPILE_LIMIT

_LARGEST: Final = 4 * 2**20
_LONGEST_LINE: Final = 240
_PLACE: Final = re.compile(r"^(?P<file>.+\.pyw?):(?P<line>\d{1,7})$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Excerpt:
    """Lines of a file."""

    source: str
    line: int
    first: int
    lines: tuple[str, ...]
    changed: bool = False

    def numbered(self) -> Iterator[tuple[int, str, bool]]:
        """Each line with its number, and whether it is the one that is meant."""
        for offset, text in enumerate(self.lines):
            number = self.first + offset
            yield number, text, number == self.line


class Excerpts:
    """Reads each file once."""

    def __init__(self, *, around: int = 2) -> None:
        """Read files when they are asked for."""
        self._around = around
        self._files: dict[str, tuple[list[str], float] | None] = {}

    def of(self, source: str, since: float = 0.0) -> Excerpt | None:
        """The lines around a place; None where there is no such file or line here."""
        place = _PLACE.match(source)
        if place is None:
            return None
        found = self._file(place["file"])
        line = int(place["line"])
        if found is None or not 1 <= line <= len(found[0]):
            return None
        first = max(1, line - self._around)
        lines = found[0][first - 1 : line + self._around]
        return Excerpt(
            source=source,
            line=line,
            first=first,
            lines=tuple(printable(cleaner().text(text[:_LONGEST_LINE]).expandtabs(4)) for text in lines),
            changed=0 < since < found[1],
        )

    def _file(self, name: str) -> tuple[list[str], float] | None:
        if name not in self._files:
            self._files[name] = _read(name)
        return self._files[name]


def _read(name: str) -> tuple[list[str], float] | None:
    """Lines of a file and when it was changed; None where it is missing, too large, or no regular file."""
    try:
        path = Path(os.path.expanduser(name)).resolve()
        if path.suffix not in (".py", ".pyw"):  # a link leads elsewhere
            return None
        state = path.stat()
        if not path.is_file() or state.st_size > _LARGEST:
            return None
        return path.read_text(encoding="utf-8", errors="replace").splitlines(), state.st_mtime
    except (
        OSError,
        ValueError,
        RuntimeError,
    ):  # it is not here: the report comes from another machine, or the file is gone
        return None


def is_name(question: str, name: str) -> bool:
    """Whether the question is the name, or a pattern that matches it."""
    return bool(name) and (question == name or fnmatch.fnmatchcase(name, question))


def is_inside(question: str, module: str) -> bool:
    """Whether a module is the one in question, or inside it."""
    return bool(module) and (is_name(question, module) or fnmatch.fnmatchcase(module, f"{question}.*"))


def is_operator(question: str, op: str) -> bool:
    """Whether the question names an operator, with or without namespace and overload."""
    names = (op, op.rpartition(".")[0], op.partition(".")[2], op.partition(".")[2].rpartition(".")[0])
    return any(is_name(question, name) for name in names)


def is_at(question: str, source: str) -> bool:
    """Whether the question is `file:12`, the end of that, or the file."""
    return bool(source) and (
        is_name(question, source)
        or source.endswith(f"/{question}")
        or is_name(question, source.rpartition(":")[0])
        or source.rpartition(":")[0].endswith(f"/{question}")
    )


def is_of_reason(question: str, reason: Reason) -> bool:
    """Whether a reason has that code, is about that node, or was caused or given by it."""
    node = reason.node.partition(" ")[0]
    return question in (reason.code, node, reason.cause.partition(" ")[0], reason.by) and bool(question)


def means_node(question: str, node: NodePlacement) -> bool:
    """Whether the question is about a refused node."""
    return (
        is_name(question, node.node)
        or is_operator(question, node.op)
        or is_inside(question, node.module)
        or is_at(question, node.source)
        or any(question == reason.code or question == reason.cause.partition(" ")[0] for reason in node.chain)
    )


def means_row(question: str, row: SubgraphAudit) -> bool:
    """Whether the question is about a subgraph, or about something in it."""
    return (
        any(is_name(question, name) for name in (row.id, row.identity, row.id.partition("/")[2]))
        or any(is_inside(question, module) for module in (row.module, *row.modules))
        or any(is_operator(question, op) for op in row.ops)
        or any(is_at(question, source) for source in row.sources)
        or any(is_of_reason(question, reason) for reason in row.reasons)
    )


def means_miss(question: str, miss: NearMiss) -> bool:
    """Whether the question is about a near miss."""
    return (
        any(is_name(question, name) for name in (miss.node, miss.name, miss.kind))
        or is_operator(question, miss.node)
        or is_inside(question, miss.module)
        or is_at(question, miss.source)
        or is_of_reason(question, miss.reason)
    )


def known_names(audit: Report) -> set[str]:
    """The names that a question may have, for the hint at a misspelt one."""
    found: set[str] = set(CODES)
    for graph in audit.graphs:
        found |= {graph.id, *(setting.key for setting in graph.settings), *(run.name for run in graph.passes)}
        for miss in graph.near_misses:
            found |= {miss.node, miss.module}
        for part in graph.parts:
            for node in part.declined:
                found |= {node.node, node.op, node.module, node.op.rpartition(".")[0]}
            for row in part.subgraphs:
                found |= {row.id, row.module, *row.modules, *row.ops}
    return found - {""}


_MOST_PLACES: Final = 8
# Codes of what is decided before anything is built.
_REFUSALS: Final = frozenset(
    {"no_override", "override_refused", "lowering_excluded", "unsupported_op", "engine_missing", "cluster_refused"}
    | {"unsafe_in_eager"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One link of the chain."""

    what: str
    reason: Reason | None = None
    tone: str = ""
    passed_over: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer about one thing."""

    title: str
    lowering: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    steps: tuple[Step, ...] = ()
    source: str = ""
    time: float = 0.0
    places: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Why:
    """The answers to one question; `str` gives them as text, and rich prints them in colour."""

    question: str
    answers: tuple[Answer, ...]

    def to_text(self) -> str:
        """Plain text, 120 columns wide."""
        return plain(*renderables(self))

    def __str__(self) -> str:
        return plain(*renderables(self), width=None)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from renderables(self)


def why(audit: Report, name: str) -> Why:
    """Explain why something is where it is.

    What fell back, was left alone or changed comes first; what is where it was planned is one answer at the end.

    Args:
        audit: the report.
        name: a subgraph (`g0.forward.1`), a graph or part, a node, an operator (`aten.topk`, with or without overload),
            a module path (what is inside it counts), a `file.py:12`, a pass, an option, a cache, or a code of a
            reason; `*` and `?` stand for anything.

    Raises:
        ReportError: the report has nothing of that name, or nothing to tell of it.
    """
    question = name.strip()
    answers = [answer for graph in audit.graphs for answer in _of_graph(graph, question)] if question else []
    answers += [answer for graph in audit.graphs for answer in _settings(graph, question)] if question else []
    if not answers:
        known = known_names(audit)
        if question in known:
            raise ReportError(
                f"the report has {question!r}, and nothing to tell of it: nothing in it was built or refused"
            )
        hint = nearest(question, known) or "; name a module, an operator, a node, a subgraph or a pass"
        raise ReportError(f"the report has nothing called {question!r}{hint}")
    return Why(question=question, answers=tuple(_grouped(answers)))


def _of_graph(graph: GraphAudit, question: str) -> Iterator[Answer]:
    plain: list[SubgraphAudit] = []
    for part in graph.parts:
        here = is_name(question, graph.id) or is_name(question, f"{graph.id}.{part.name}")
        told: set[str] = set()
        for node in part.declined:
            row = _row_of(node, part)
            if here or means_node(question, node) or (row and is_name(question, row.id)):
                told |= {row.id} if row else set()
                yield _node(graph, part, node, row)
        for row in part.subgraphs:
            if not (here or means_row(question, row)) or row.id in told:
                continue
            if row.reasons or row.mismatch or row.superseded or is_name(question, row.id):
                yield _subgraph(graph, part, row)
            else:
                plain.append(row)
    for miss in graph.near_misses:
        if is_name(question, graph.id) or means_miss(question, miss):
            yield _near_miss(graph, miss)
    yield from _rewritten(graph, question)
    yield from _whole(graph, question)
    if plain:
        yield _as_planned(graph, plain)


def _row_of(node: NodePlacement, part: PartAudit) -> SubgraphAudit | None:
    """The subgraph that a refused node is in, as far as it can be told."""
    named = [row for row in part.subgraphs if node.node in row.refused and not row.parent]
    alike = [row for row in part.subgraphs if row.planned == node.lowering and node.op in row.ops and not row.refused]
    return next(iter((*named, *alike)), None)


def _node(graph: GraphAudit, part: PartAudit, node: NodePlacement, row: SubgraphAudit | None) -> Answer:
    refused = [Step(what=f"{r.by or 'an earlier lowering'} refused it", reason=r, tone="warn") for r in node.chain]
    known = {_said(reason) for reason in node.chain}
    built = list(_chain(row))[1 if row.planned else 0 :] if row else []
    # What the operator's own chain says is not said again, nor less than it.
    then = [step for step in built if not step.passed_over and (not step.reason or _said(step.reason) not in known)]
    placed = Step(what=f"so it was placed on {node.lowering}")
    source = node.source or next((reason.source for reason in node.chain if reason.source), "")
    where = [("module", node.module), ("node", f"{node.node} in {graph.id}.{part.name}")]
    return Answer(
        title=f"{node.op} is on {node.lowering}",
        lowering=node.lowering,
        facts=(*where, *((("subgraph", _about(row)),) if row else ()), *_neighbours(part, row)),
        steps=(*refused, placed, *then),
        source=source,
        time=graph.time,
    )


def _subgraph(graph: GraphAudit, part: PartAudit, row: SubgraphAudit) -> Answer:
    said = "did not run as planned" if row.mismatch else f"is on {row.lowering or 'nothing yet'}"
    source = next((reason.source for reason in row.reasons if reason.source), "") or next(iter(row.sources), "")
    facts = [
        ("subgraph", _about(row)),
        ("module", row.module or ", ".join(row.modules[:3])),
        ("operators", rows.counts(row.ops, limit=6)),
        ("identity", row.identity),
    ]
    return Answer(
        title=f"{row.id} {said}",
        lowering=row.lowering,
        facts=(*facts, *_neighbours(part, row)),
        steps=tuple(_chain(row)),
        source=source,
        time=graph.time,
    )


def _about(row: SubgraphAudit) -> str:
    share = f", {percent(row.share)} of the work" if row.share is not None else ""
    return f"{row.id}, {plural(row.nodes, 'operator')}{share}"


def _chain(row: SubgraphAudit) -> Iterator[Step]:
    """What was planned, tried and run, in order."""
    if row.planned:
        yield Step(what=f"the plan for {row.id} was {row.planned}")
    for attempt in row.attempts:
        if attempt.ok:
            took = rows.duration(attempt.seconds)
            yield Step(what=f"{attempt.lowering} built it{f' in {took}' if took else ''}", tone="good")
        elif attempt.reason is not None:
            refused = attempt.reason.code in _REFUSALS
            what = f"{attempt.lowering} {'refused it' if refused else 'failed to build it'}"
            yield Step(what=what, reason=attempt.reason, tone="warn")
        else:
            said = attempt.skipped.removeprefix("skipped: ")
            yield Step(what=f"{attempt.lowering} was passed over: {said}", passed_over=True)
    for retreat in row.retreats:
        what = f"{retreat.source_lowering} retreated to {retreat.target_lowering}"
        told = any(attempt.reason == retreat.reason for attempt in row.attempts)
        yield Step(what=what, reason=None if told else retreat.reason, tone="warn")
    for check in row.verifications:
        tone = "bad" if check.state == "wrong" else ""
        detail = f": {check.detail}" if check.detail else ""
        yield Step(what=f"compared with its reference, {check.name} is {check.state}{detail}", tone=tone)
    seen: set[tuple[str, str]] = set()
    for ran in row.runs:
        if (ran.lowering, ran.evidence) not in seen:
            seen.add((ran.lowering, ran.evidence))
            yield Step(what=f"it ran on {ran.lowering}{f': {ran.evidence}' if ran.evidence else ''}", tone="good")
    for line in filter(None, (rows.speed(row), *map(rows.recording_line, row.recordings))):
        yield Step(what=line)
    if row.superseded:
        yield Step(what="it was given up, as its whole graph retreated", tone="warn")
    elif not row.runs:
        yield Step(what="it was not called yet")
    if row.mismatch:
        yield Step(what=f"this differs from the plan: it was {row.difference}", tone="bad")


def _neighbours(part: PartAudit, row: SubgraphAudit | None) -> Iterator[tuple[str, str]]:
    """What it costs to have a subgraph of its own."""
    if row is None:
        return
    for merge in part.merges:
        if merge.between == row.id:
            size = f", {merge.bytes_hint:,} bytes" if merge.bytes_hint > 0 else ""
            yield "advice", f"{merge.sentence}; {plural(merge.tensors, 'tensor')}{size} cross the boundaries now"


def _near_miss(graph: GraphAudit, miss: NearMiss) -> Answer:
    ended = {"graph_break": "ended the graph here", RECOMPILE_LIMIT: "compiles the function no more"}
    if miss.reason.code in ended:
        return Answer(
            title=miss.kind.replace("_", " "),
            facts=(("graph", f"{graph.id} {graph.function}".rstrip()),),
            steps=(Step(what=f"{miss.name} {ended[miss.reason.code]}", reason=miss.reason, tone="warn"),),
            source=miss.source,
            time=graph.time,
        )
    return Answer(
        title=f"near miss of {miss.name}",
        facts=(("kind", miss.kind), ("module", miss.module), ("node", f"{miss.node} in {graph.id}")),
        steps=(Step(what=f"{miss.name} followed {miss.node}, and stopped", reason=miss.reason, tone="warn"),),
        source=miss.source or miss.reason.source,
        time=graph.time,
    )


def _rewritten(graph: GraphAudit, question: str) -> Iterator[Answer]:
    runs = [run for run in graph.passes if is_name(question, run.name)]
    for run in runs:
        result = f"{rows.pass_result(run)}: {plural(run.rewrites, 'place')} rewritten"
        took = rows.duration(run.seconds)
        note = f"; {run.note}" if run.note else ""
        yield Answer(
            title=f"the pass {run.name} on {graph.id}",
            facts=(("operators", rows.node_diff(run.node_diff)), ("time", took)),
            steps=(Step(what=f"{result}{note}", tone="good" if run.rewrites else ""),),
            time=graph.time,
        )
    for site in graph.rewrites:
        if is_name(question, site.node) or is_inside(question, site.module) or is_at(question, site.source):
            made = f"left {site.target} as it is called" if site.kept else f"made it {site.target}"
            detail = rows.rewrite_text(site)
            step = Step(what=f"{site.name} {made}{f': {detail}' if detail else ''}", tone="good")
            yield Answer(
                title=f"{site.kind} at {site.node} {'is called' if site.kept else 'was rewritten'}",
                facts=(("module", site.module), ("node", f"{site.node} in {graph.id}")),
                steps=(step,),
                source=site.source,
                time=graph.time,
            )


def _whole(graph: GraphAudit, question: str) -> Iterator[Answer]:
    """Attempts and retreats that are about a whole graph or part."""
    found: list[tuple[str, str, Reason]] = [
        (r.subgraph, f"{r.source_lowering} retreated to {r.target_lowering}", r.reason) for r in graph.retreats
    ]
    found += [(a.subgraph, f"{a.lowering} failed", a.reason) for a in graph.attempts if a.reason is not None]
    for subgraph, what, reason in found:
        meant = any(is_name(question, name) for name in (graph.id, subgraph)) or is_of_reason(question, reason)
        if meant or is_at(question, reason.source):
            step = Step(what=what, reason=reason, tone="warn")
            yield Answer(title=f"{subgraph}: {what}", steps=(step,), source=reason.source, time=graph.time)
    for cache in graph.caches:
        if is_name(question, cache.cache):
            where = cache.subgraph or f"{graph.id} {cache.part}".rstrip()
            note = rows.cache_note(dataclasses.replace(cache, reason=None))
            step = Step(what=f"{cache.verdict}{f': {note}' if note else ''}", reason=cache.reason)
            yield Answer(title=f"the cache {cache.cache} for {where}", facts=(("key", cache.key),), steps=(step,))


def _settings(graph: GraphAudit, question: str) -> Iterator[Answer]:
    for setting in graph.settings:
        if question.replace("-", "_") != setting.key and question != setting.key:
            continue
        asked = f"{setting.requested!r} was requested" if setting.requested else "nothing was requested"
        steps = [Step(what=f"{asked}; the value came from {setting.origin or 'somewhere that was not recorded'}")]
        if setting.changed_by:
            changed = Step(
                what=f"{setting.changed_by} changed it to {setting.effective!r}", reason=setting.reason, tone="warn"
            )
            steps.append(changed)
        else:
            steps.append(Step(what=f"{setting.effective!r} took effect", tone="good"))
        yield Answer(title=f"the option {setting.key}", steps=tuple(steps), time=graph.time)


def _as_planned(graph: GraphAudit, found: Sequence[SubgraphAudit]) -> Answer:
    steps: list[Step] = []
    for lowering in dict.fromkeys(row.lowering for row in found):
        same = [row for row in found if row.lowering == lowering]
        ids = ", ".join(row.id for row in same[:4]) + (f" and {len(same) - 4} more" if len(same) > 4 else "")
        idle = sum(1 for row in same if row.ran is None)
        called = "" if not idle else f"; {idle} not called yet"
        evidence = next((row.evidence for row in same if row.evidence), "")
        proof = f" ({evidence})" if evidence else ""
        steps.append(Step(what=f"{lowering or 'nothing'} has {ids}, as planned{called}{proof}", tone="good"))
    return Answer(title=f"as planned in {graph.id}", steps=tuple(steps))


def _grouped(answers: Iterable[Answer]) -> Iterator[Answer]:
    """Equal answers about several places as one, with the other places."""
    groups: dict[object, list[Answer]] = {}
    for answer in answers:
        reasons = tuple(_said(step.reason) for step in answer.steps if step.reason is not None)
        alike = (answer.title, answer.lowering, reasons, tuple(step.tone for step in answer.steps))
        groups.setdefault(alike if reasons else answer, []).append(answer)
    for same in groups.values():
        places = [_place(answer) for answer in same[1:]]
        more = [f"and {len(places) - _MOST_PLACES} more"] if len(places) > _MOST_PLACES else []
        yield dataclasses.replace(same[0], places=(*places[:_MOST_PLACES], *more))


def _place(answer: Answer) -> str:
    facts = dict(answer.facts)
    what = facts.get("node") or facts.get("subgraph") or facts.get("graph") or answer.title
    return ", ".join(piece for piece in (what, facts.get("module", ""), answer.source) if piece)


def _said(reason: Reason) -> tuple[str, str, str, str, str]:
    return reason.code, reason.sentence, reason.observed, reason.needed, reason.by


_TONES: Final = {"bad": "bold red", "warn": "yellow", "good": "green", "": "default"}


def renderables(found: Why) -> Iterator[RenderableType]:
    """Each answer, with a line between them."""
    excerpts = Excerpts()
    for number, answer in enumerate(found.answers):
        if number:
            yield Text()
        yield Text(one_line(answer.title), style=f"bold {STYLES.get(answer.lowering, '')}".strip())
        facts = (*answer.facts, ("source", answer.source))
        yield Facts(*((name, Text(one_line(value))) for name, value in facts if value), indent=2)
        excerpt = excerpts.of(answer.source, answer.time)
        if excerpt is not None:
            yield Padding(_lines(excerpt), (0, 0, 0, 4))
        for number, step in enumerate(answer.steps, 1):
            yield from _step(number, step, answer)
        if answer.places:
            yield Text(f"  the same holds for {len(answer.places)} more:" if len(answer.places) > 1 else "  likewise:")
            for place in answer.places:
                yield Padding(Text(one_line(place), style="dim"), (0, 0, 0, 4))


def _lines(excerpt: Excerpt) -> Text:
    text = Text()
    width = len(str(excerpt.first + len(excerpt.lines)))
    for number, line, meant in excerpt.numbered():
        mark = ">" if meant else " "
        text.append(f"{mark} {number:>{width}} | {line}\n", style="bold" if meant else "dim")
    if excerpt.changed:
        text.append("  (the file was changed after the run)\n", style="yellow")
    text.rstrip()
    return text


def _step(number: int, step: Step, answer: Answer) -> Iterator[RenderableType]:
    head = Text(one_line(step.what), style=_TONES[step.tone])
    reason = step.reason
    if reason is not None:
        head.append(f": {one_line(reason.sentence)}", style="default")
        head.append(one_line(f" [{reason.code}]"), style="dim")
    yield Facts((f"{number}.", head), indent=2)
    if reason is None:
        return
    facts = {
        "observed": reason.observed,
        "needed": reason.needed,
        "at": reason.node,
        "caused by": reason.cause,
        "source": reason.source if reason.source != answer.source else "",
        "to change": reason.lever,
    }
    shown = ((name, Text(one_line(value), "italic" if name == "to change" else "")) for name, value in facts.items())
    yield Facts(*((name, value) for name, value in shown if value.plain), indent=8)
