"""Fleets: the timelines of a folder, grouped by equal decisions, and how the groups differ.

Reports are made one file at a time, and of each only a line is held on to. What a report says of decisions is turned
into facts: sentences without numbers of graphs, times, paths and ranks. Processes with the same facts are one group; of
the largest group and up to 31 others the facts are kept, to say in what they differ.
"""

import dataclasses
import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from omnicomp.audit.fold import with_shares
from omnicomp.audit.identity import with_identities
from omnicomp.audit.model import GraphAudit, Report, Shares
from omnicomp.audit.source import load
from omnicomp.audit.views.layout import FittingTable, cell, plain
from omnicomp.audit.views.rows import percent, plural, summary
from omnicomp.errors import OmnicompError, TimelineError
from omnicomp.safety.escapes import html_text as e
from omnicomp.safety.escapes import one_line
from omnicomp.timeline import Retreat
from omnicomp.timeline.files import ROTATED, Unread

FLEET_SCHEMA: Final = 1

_SUFFIX: Final = ".jsonl"
_GROUPS: Final = 32
_SHOWN: Final = 50
_UNREADABLE: Final = 100
_LATE: Final = 10.0  # seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """One process that captured graphs."""

    path: str  # of its file, relative to the folder
    rank: int  # its rank in a distributed job, else 0
    pid: int  # its id
    group: int  # number of its group
    graphs: int  # how many graphs it captured
    subgraphs: int  # how many subgraphs they have
    shares: dict[str, float]  # part of the work by lowering
    fallbacks: int  # how many places run eager although an earlier lowering was asked for
    retreats: int  # how often something moved to another lowering after a failure
    mismatches: int  # how many subgraphs did not run as planned
    seconds: float  # wall time of its compilations
    caches: dict[str, int]  # verdicts of compile caches, with their number
    started: float  # when it captured its first graph, in seconds since the epoch; 0 if unknown
    unfinished: int = 0  # how much began and has no end: the process itself, graphs, parts that were never called


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Processes whose reports have the same facts."""

    number: int  # its number; 0 is the largest group, with which the others are compared
    digest: str  # hash of what its reports say
    processes: int  # how many it has
    ranks: tuple[int, ...]  # of these, in order
    example: str  # path of the file of its first process
    summary: str  # the report of that process in a line
    added: tuple[str, ...] = ()  # facts of it that the first group does not have, the first fifty
    missing: tuple[str, ...] = ()  # facts of the first group that it does not have, likewise
    differences: int = 0  # how many of both there are; -1 if they are not known, beyond the 32nd kind of report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """What a folder of timelines says."""

    folder: str  # the folder
    processes: tuple[Process, ...]  # in the order of ranks, then of paths
    groups: tuple[Group, ...]  # the largest first
    unreadable: tuple[tuple[str, str], ...] = ()  # files that could not be read, the first hundred, with the error
    failed: int = 0  # how many could not be read
    torn: int = 0  # lines that were skipped, because a process was killed in them
    unread: tuple[Unread, ...] = ()  # lines that nothing was read from, by cause; the torn ones are among them

    def summary(self) -> str:
        """One line: how many processes there are, and whether they are alike."""
        ranks = {process.rank for process in self.processes}
        head = f"omni: {plural(len(self.processes), 'process')}, {plural(len(ranks), 'rank')}"
        clauses: list[str] = []
        if len(self.groups) == 1:
            clauses.append("all reports are equal" if len(self.processes) > 1 else self.groups[0].summary[6:])
        elif self.groups:
            first = self.groups[0]
            clauses.append(f"{len(self.groups)} different reports, {first.processes} of them equal")
        unfinished = sum(1 for process in self.processes if process.unfinished)
        if unfinished:
            clauses.insert(0, f"{unfinished} UNFINISHED")
        late = stragglers(self.processes)
        if late:
            median = statistics.median(process.seconds for process in self.processes)
            slowest = max(late, key=lambda process: process.seconds)
            told = f"rank {slowest.rank} {slowest.seconds:.0f} s, the median {median:.0f} s"
            clauses.append(f"{plural(len(late), 'straggler')} in compiling: {told}")
        if self.torn:
            clauses.append(f"{plural(self.torn, 'torn line')} skipped")
        rest = [str(each) for each in self.unread if each.kind != "torn"]
        if rest:
            clauses.append(f"left out: {', '.join(rest)}")
        if self.failed:
            clauses.append(f"{plural(self.failed, 'file')} could not be read")
        return f"{head}: {'; '.join(clauses) or 'nothing was compiled'}"

    def to_json(self) -> str:
        """The JSON form: the fields, `schema` and `summary`."""
        data = {"schema": FLEET_SCHEMA, "summary": self.summary(), **dataclasses.asdict(self)}
        return f"{json.dumps(data, indent=2)}\n"

    def to_text(self, width: int | None = 120) -> str:
        """Plain text; as wide as the terminal if no width is given."""
        shown: list[RenderableType] = [cell(self.summary())]
        for group in self.groups[1:]:
            shown += [Text(), cell(f"Report {_name(group.number)} against {_name(0)}")]
            shown += [cell(f"  {line}") for line in _differences(group)]
        for title, columns, lines in (
            ("Reports", _GROUP_COLUMNS, _group_rows(self)),
            ("Processes", _PROCESS_COLUMNS, _process_rows(self)),
        ):
            filled = FittingTable(title, *columns)
            for line in lines:
                filled.add_row(*map(cell, line))
            shown += [Text(), filled]
        shown += [cell(_more(self))] if _more(self) else []
        shown += [cell(f"{path}: {error}") for path, error in self.unreadable]
        return plain(*shown, width=width)

    def to_html(self) -> str:
        """One self-contained page."""
        body = [f"<h1>omnicomp audit</h1>\n<p>{e(self.summary().removeprefix('omni: '))}</p>"]
        for group in self.groups[1:]:
            items = "".join(f"<li>{e(line)}</li>" for line in _differences(group))
            title = f"Report {_name(group.number)} against {_name(0)}"
            body.append(f"<section><h2>{e(title)}</h2>\n<ul>{items}</ul></section>")
        body += [_html_table("Reports", _GROUP_COLUMNS, _group_rows(self))]
        body.append(_html_table("Processes", _PROCESS_COLUMNS, _process_rows(self)))
        body += [f'<p class="dim">{e(_more(self))}</p>'] if _more(self) else []
        if self.unreadable:
            items = "".join(f"<li>{e(path)}: {e(error)}</li>" for path, error in self.unreadable)
            body.append(f'<section><h2 class="bad">Could not be read</h2>\n<ul>{items}</ul></section>')
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
            f"<title>omnicomp audit</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n"
            + "\n".join(body)
            + "\n</body>\n</html>\n"
        )


@dataclasses.dataclass
class _Kind:
    """A group while files come in; `facts` is None beyond the 32nd group."""

    number: int
    example: str
    summary: str
    facts: frozenset[str] | None
    processes: int = 0
    ranks: set[int] = dataclasses.field(default_factory=set[int])


def fleet(folder: str | Path) -> Fleet:
    """Read every timeline (`*.jsonl`, with what it was rotated to) in a folder and the folders in it.

    Raises:
        TimelineError: it is no folder that can be read, or no timeline is in it that can be.
    """
    root = Path(folder)
    paths = list(timelines(root))
    if not paths:
        lever = f"write some with OMNICOMP_TIMELINE='{root}/%p{_SUFFIX}'"
        raise TimelineError(f"{root} has no timelines (*{_SUFFIX}); {lever}")
    kinds: dict[str, _Kind] = {}
    found: list[Process] = []
    unreadable: list[tuple[str, str]] = []
    failed = torn = 0
    unread: dict[tuple[str, str], Unread] = {}
    for path in paths:
        name = str(path.relative_to(root))
        try:
            processes, skipped, lines = _read(path, name, kinds)
        except OmnicompError as error:
            failed += 1
            if len(unreadable) < _UNREADABLE:
                unreadable.append((name, str(error)))
            continue
        found += processes
        torn += skipped
        for each in lines:
            key = each.kind, each.detail if each.kind == "unknown" else ""
            count = unread[key].count if key in unread else 0
            unread[key] = dataclasses.replace(unread.get(key, each), count=count + each.count)
    if failed == len(paths):
        raise TimelineError(f"none of {plural(failed, 'file')} could be read; the first: {unreadable[0][1]}")
    groups, numbers = _groups(kinds)
    found = [dataclasses.replace(process, group=numbers[process.group]) for process in found]
    return Fleet(
        folder=str(root),
        processes=tuple(sorted(found, key=lambda process: (process.rank, process.path, process.pid))),
        groups=groups,
        unreadable=tuple(unreadable),
        failed=failed,
        torn=torn,
        unread=tuple(unread.values()),
    )


def _read(path: Path, name: str, kinds: dict[str, _Kind]) -> tuple[list[Process], int, tuple[Unread, ...]]:
    """The processes of a file, its torn lines, and all lines that nothing was read from."""
    report = load(path)
    processes = [_process(name, *key, audit, kinds) for key, audit in _by_process(report)]
    return processes, report.skipped, report.unread


def stragglers(processes: Sequence[Process]) -> list[Process]:
    """Processes that compiled for twice as long as the median, and ten seconds longer: the others waited for them."""
    if len(processes) < 3:
        return []
    median = statistics.median(process.seconds for process in processes)
    return [process for process in processes if process.seconds > max(2 * median, median + _LATE)]


def timelines(root: Path) -> Iterator[Path]:
    """Timelines in a folder, in order; of one that was rotated only the rotated file may be left."""
    if not root.is_dir():
        raise TimelineError(f"{root} is no folder")
    names = {path for path in root.rglob(f"*{_SUFFIX}") if path.is_file()}
    alone = (path for path in root.rglob(f"*{_SUFFIX}{ROTATED}") if path.is_file())
    names |= {path for path in alone if Path(str(path).removesuffix(ROTATED)) not in names}
    yield from sorted(names)


def _by_process(report: Report) -> Iterator[tuple[tuple[int, int], Report]]:
    """The report of each process that wrote to a file."""
    graphs: dict[tuple[int, int], list[GraphAudit]] = {}
    for graph in report.graphs:
        graphs.setdefault((graph.rank, graph.pid), []).append(graph)
    for process in report.processes:
        graphs.setdefault((process.rank, process.pid), [])
    if len(graphs) == 1:
        yield next(iter(graphs)), report
        return
    for key, own in graphs.items():
        # Beside those of other processes they were told apart, and their shares were of all.
        ends = tuple(process for process in report.processes if (process.rank, process.pid) == key)
        parted = with_identities([_without_shares(graph) for graph in own])
        audit = Report(graphs=parted, events=report.events, processes=ends)
        yield key, with_shares(audit)


def _without_shares(graph: GraphAudit) -> GraphAudit:
    parts = tuple(
        dataclasses.replace(
            part,
            subgraphs=tuple(dataclasses.replace(row, share=None, shares=Shares()) for row in part.subgraphs),
        )
        for part in graph.parts
    )
    return dataclasses.replace(graph, parts=parts)


def _process(path: str, rank: int, pid: int, audit: Report, kinds: dict[str, _Kind]) -> Process:
    facts = facts_of(audit)
    digest = hashlib.sha256("\n".join(sorted(facts)).encode("utf-8", "backslashreplace")).hexdigest()[:16]
    kind = kinds.get(digest)
    if kind is None:
        kept = facts if len(kinds) < _GROUPS else None
        kind = kinds[digest] = _Kind(len(kinds), path, summary(audit), kept)
    kind.processes += 1
    kind.ranks.add(rank)
    times = [graph.time for graph in audit.graphs if graph.time]
    return Process(
        path=path,
        rank=rank,
        pid=pid,
        group=kind.number,
        graphs=len(audit.graphs),
        subgraphs=sum(1 for row in audit.subgraphs if not row.parent),
        shares=audit.shares,
        fallbacks=len(audit.fallbacks),
        retreats=len(audit.retreats),
        mismatches=len(audit.mismatches),
        seconds=sum(sum(graph.compile_seconds.values()) for graph in audit.graphs),
        caches=dict(sorted(Counter(cache.verdict for graph in audit.graphs for cache in graph.caches).items())),
        started=min(times, default=0.0),
        unfinished=len(audit.unfinished),
    )


def _groups(kinds: dict[str, _Kind]) -> tuple[tuple[Group, ...], dict[int, int]]:
    """The groups, the largest first, and their numbers by those of the kinds."""
    order = sorted(kinds.items(), key=lambda item: (-item[1].processes, min(item[1].ranks), item[1].number))
    first = next((kind.facts for _, kind in order if kind.facts is not None), frozenset[str]())
    groups: list[Group] = []
    for number, (digest, kind) in enumerate(order):
        known = kind.facts is not None and order[0][1].facts is not None
        added = sorted(kind.facts - first) if known and kind.facts is not None else []
        missing = sorted(first - kind.facts) if known and kind.facts is not None else []
        groups.append(
            Group(
                number=number,
                digest=digest,
                processes=kind.processes,
                ranks=tuple(sorted(kind.ranks)),
                example=kind.example,
                summary=kind.summary,
                added=tuple(added[:_SHOWN]),
                missing=tuple(missing[:_SHOWN]),
                differences=len(added) + len(missing) if known else -1,
            )
        )
    return tuple(groups), {kind.number: number for number, (_, kind) in enumerate(order)}


def ranges_of(numbers: Iterable[int]) -> str:
    """`0-3, 5` of 0, 1, 2, 3, 5."""
    pieces: list[list[int]] = []
    for number in sorted(set(numbers)):
        if pieces and number == pieces[-1][1] + 1:
            pieces[-1][1] = number
        else:
            pieces.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in pieces)


# Lines of processes that a view shows; equal ranks are in the table of groups.
_MOST: Final = 500

_GROUP_COLUMNS: Final = ("report", "processes", "ranks", "example", "what it says")
_PROCESS_COLUMNS: Final = (
    *("rank", "process", "file", "report", "graphs", "subgraphs"),
    *("work", "issues", "compiled", "caches"),
)
_STYLE: Final = """\
:root { color-scheme: light dark; --line: #8884; --dim: #777; --bad: #c0392b; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1320px; padding: 24px; }
h1 { font-size: 20px; } h2 { font-size: 15px; margin-top: 28px; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 4px 10px; border-bottom: 1px solid var(--line); }
th { font-size: 12px; color: var(--dim); white-space: nowrap; }
td { overflow-wrap: anywhere; }
.bad { color: var(--bad); } .dim { color: var(--dim); } ul { list-style: none; padding: 0; }
li { font: 12.5px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
"""

Rows = Iterable[Sequence[str]]


def _name(number: int) -> str:
    """`A` for the first group, `B`, …, `Z`, `AA`."""
    letters = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters


def _group_rows(found: Fleet) -> Iterator[Sequence[str]]:
    for group in found.groups:
        says = group.summary.removeprefix("omni: ")
        yield _name(group.number), str(group.processes), ranges_of(group.ranks), group.example, says


def _process_rows(found: Fleet) -> Iterator[Sequence[str]]:
    for process in found.processes[:_MOST]:
        yield (
            str(process.rank),
            str(process.pid or ""),
            process.path,
            _name(process.group),
            str(process.graphs),
            str(process.subgraphs),
            ", ".join(f"{name or 'unplanned'} {percent(share)}" for name, share in process.shares.items()),
            _issues(process),
            f"{process.seconds:.1f} s",
            ", ".join(f"{verdict} {count}" for verdict, count in process.caches.items()),
        )


def _issues(process: Process) -> str:
    counts = {
        "unfinished": process.unfinished,
        "not as planned": process.mismatches,
        "fallbacks": process.fallbacks,
        "retreats": process.retreats,
    }
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)


def _differences(group: Group) -> list[str]:
    """Facts that a group has beside the first one's, and those that it lacks."""
    lines = [f"+ {fact}" for fact in group.added] + [f"- {fact}" for fact in group.missing]
    more = group.differences - len(lines)
    if group.differences < 0:
        lines.append("not compared: there are more kinds of reports than are held on to")
    elif more > 0:
        lines.append(f"and {more} more")
    return lines


def _more(found: Fleet) -> str:
    hidden = len(found.processes) - _MOST
    return f"and {hidden} more processes; the JSON form has them all" if hidden > 0 else ""


def _html_table(title: str, columns: Sequence[str], rows: Rows) -> str:
    head = "".join(f"<th>{e(column)}</th>" for column in columns)
    body = "\n".join(f"<tr>{''.join(f'<td>{e(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<section><h2>{e(title)}</h2>\n<div class="scroll"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div></section>"
    )


# What may differ from process to process, and changes nothing that is compiled.
_OWN: Final = ("timeline", "timeline_max_bytes", "progress", "summary", "ranges", "fallback", "device")


def facts_of(audit: Report) -> frozenset[str]:
    """The facts of a report: without numbers of graphs, times, paths, ranks and verdicts of caches."""
    return frozenset(_counted(_facts(audit)))


def _counted(facts: Iterable[str]) -> Iterator[str]:
    for fact, count in Counter(facts).items():
        yield fact if count == 1 else f"{fact} ({count} times)"


def _facts(audit: Report) -> Iterator[str]:
    for name, version in audit.environment.versions.items():
        yield f"{name} has version {version}"
    yield from _facts_of_ends(audit)
    for graph in audit.graphs:
        yield f"{graph.identity} was captured for {graph.device} {graph.device_name}".rstrip()
        for setting in graph.settings:
            if setting.key not in _OWN and setting.origin != "default":
                yield f"{graph.identity}: option {setting.key} is {setting.effective or setting.requested}"
        for run in graph.passes:
            if run.modified:
                yield f"{graph.identity}: {run.name} rewrote {plural(run.rewrites, 'place')}"
        for miss in graph.near_misses:
            yield f"{graph.identity}: {miss.name} left a candidate: {miss.reason.code}"
        for retreat in graph.retreats:
            yield f"{graph.identity}: {_moved(retreat)}"
        yield from _facts_of_rows(graph)


def _facts_of_ends(audit: Report) -> Iterator[str]:
    identities = {graph.id: graph.identity for graph in audit.graphs}
    for each in audit.unfinished:
        if each.what == "process":
            yield "the process did not record its end"
        else:
            graph, _, part = each.id.partition(".")
            ended = "captured and never built" if each.what == "graph" else f"built and never called: {part or 'all'}"
            yield f"{identities.get(graph, graph)} was {ended}"


def _facts_of_rows(graph: GraphAudit) -> Iterator[str]:
    for part in graph.parts:
        for node in part.declined:
            why = ", ".join(reason.code for reason in node.chain)
            yield f"{graph.identity}: {part.name} has {node.op} on {node.lowering}: {why}"
        for row in part.subgraphs:
            ran = "given up" if row.superseded else f"ran on {row.ran}" if row.ran else "was not called"
            yield f"{row.identity}: planned for {row.planned or 'nothing'}, {ran}"
            for retreat in row.retreats:
                yield f"{row.identity}: {_moved(retreat)}"
            for found in row.verifications:
                if found.state == "wrong":
                    yield f"{row.identity}: {found.name} was wrong, {found.direction}"


def _moved(retreat: Retreat) -> str:
    return f"{retreat.source_lowering} retreated to {retreat.target_lowering}: {retreat.reason.code}"


FLEET_VIEWS: Final[dict[str, Callable[[Fleet], str]]] = {
    "text": lambda found: found.to_text(),
    "json": Fleet.to_json,
    "html": Fleet.to_html,
    "summary": lambda found: f"{one_line(found.summary())}\n",
}
