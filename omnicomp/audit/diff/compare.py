"""What differs between two reports: a pure function of both."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

from omnicomp.audit.diff.report import KINDS, AuditDiff, Change, Measure, shown
from omnicomp.audit.identity import operators_of, without_number
from omnicomp.audit.model import Fallback, GraphAudit, PartAudit, Report, Setting, SubgraphAudit
from omnicomp.audit.views.rows import step_of, summary
from omnicomp.timeline import NearMiss, Retreat, Rewrite

# Where events go, and what is said while a program runs: another value makes no other program.
_OF_NO_EFFECT: Final = frozenset({"timeline", "timeline_max_bytes", "progress", "summary", "ranges", "fallback"})
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_SHOWN: Final = 8


def compare(
    before: Report, after: Report, *, time_threshold: float | None = None, memory_threshold: float | None = None
) -> AuditDiff:
    """Find what differs."""
    measured = _measures(before, after)
    found = [*_between(before, after), *_over_threshold(measured, time_threshold, memory_threshold)]
    order = list(KINDS)
    return AuditDiff(
        before=summary(before),
        after=summary(after),
        changes=tuple(sorted(_grouped(found), key=lambda change: order.index(change.kind))),
        measures=measured,
        time_threshold=time_threshold,
        memory_threshold=memory_threshold,
    )


def _between(before: Report, after: Report) -> Iterator[Change]:
    pairs, gone, new = paired_graphs(before.graphs, after.graphs)
    fallen = _by_graph(before.fallbacks), _by_graph(after.fallbacks)
    for one, other in pairs:
        yield from _graphs(one, other, fallen[0].get(one.id, []), fallen[1].get(other.id, []))
    for graph in gone:
        name = _graph_name(graph)
        about: dict[str, Any] = {"what": "graph", "graph": graph.identity, "places": (graph.function,)}
        sentence = f"the graph {name} is not there any more"
        yield Change(kind="disappeared", before=name, sentence=sentence, **about)
    for graph in new:
        name = _graph_name(graph)
        about = {"what": "graph", "graph": graph.identity, "places": (graph.function,)}
        yield Change(kind="appeared", after=name, sentence=f"the graph {name} is there now", **about)
        yield from _fallbacks([], fallen[1].get(graph.id, []), GraphAudit(id=""), graph)
    yield from _ends(before, after)
    yield from _environments(before, after)


def _ends(before: Report, after: Report) -> Iterator[Change]:
    """What has an end in one of the runs only; processes and graphs have other names there."""
    had, has = ({each.what: each for each in reversed(report.unfinished)} for report in (before, after))
    for what in dict.fromkeys((*has, *had)):
        if what in has and what not in had:
            now = has[what]
            places = tuple(filter(None, (now.place,)))
            yield Change(kind="unfinished", what=what, after="unfinished", sentence=now.sentence, places=places)
        elif what in had and what not in has:
            sentence = f"it has an end now: {had[what].sentence} before"
            yield Change(kind="finished", what=what, before="unfinished", sentence=sentence)


def _graphs(one: GraphAudit, other: GraphAudit, was: list[Fallback], now: list[Fallback]) -> Iterator[Change]:
    yield from _content(one, other)
    yield from _fallbacks(was, now, one, other)
    parts = {part.name: part for part in one.parts}
    others = {part.name: part for part in other.parts}
    fallen = {fallback.subgraph for fallback in (*was, *now) if fallback.subgraph}
    for name in dict.fromkeys((*parts, *others)):
        yield from _parts(name, parts.get(name), others.get(name), other, fallen)
    yield from _retreats(one, other)
    yield from _passes(one, other)
    yield from _options(one, other)


def _content(one: GraphAudit, other: GraphAudit) -> Iterator[Change]:
    old, new = without_number(one.identity), without_number(other.identity)
    if old == new:
        return
    if operators_of(old) == operators_of(new):
        sentence = f"{_graph_name(other)} was compiled for sizes of another class"
        yield Change(kind="sizes", what="graph", sentence=sentence, graph=other.identity, before=old, after=new)
        return
    had, has = operators(one), operators(other)
    more = [f"+{count} {op}" for op, count in sorted((has - had).items())]
    less = [f"-{count} {op}" for op, count in sorted((had - has).items())]
    shown = ", ".join((*less, *more)[:_SHOWN]) or "arguments or dtypes before autograd"
    left = len(less) + len(more) - _SHOWN
    yield Change(
        kind="edited",
        what="graph",
        graph=other.identity,
        before=old,
        after=new,
        sentence=f"{_graph_name(other)} was edited: {shown}{f', and {left} more' if left > 0 else ''}",
    )


def _fallbacks(was: list[Fallback], now: list[Fallback], one: GraphAudit, other: GraphAudit) -> Iterator[Change]:
    def key(graph: GraphAudit) -> Callable[[Fallback], Hashable]:
        identities = {row.id: operators_of(row.identity) for row in graph.subgraphs}
        return lambda f: (f.part, f.module, f.op, identities.get(f.subgraph, ""))

    gone, new = difference(was, key(one), now, key(other))
    for fallback in new:
        yield _moved(fallback, other, "fell_back", "", "eager", "runs eager now")
    for fallback in gone:
        yield _moved(fallback, other, "recovered", "eager", "", "does not fall back to eager any more")


def _moved(fallback: Fallback, graph: GraphAudit, kind: str, before: str, after: str, what: str) -> Change:
    name = fallback.op or fallback.subgraph
    return Change(
        kind=kind,
        what=name if len(name) <= 80 else f"{name[:79]}…",
        sentence=f"{name.split(', ')[0] if fallback.subgraph else name} {what}",
        graph=graph.identity,
        part=fallback.part,
        before=before,
        after=after,
        places=tuple(filter(None, (fallback.module or fallback.source,))),
        reasons=fallback.reasons if kind == "fell_back" else (),
    )


def _parts(
    name: str, one: PartAudit | None, other: PartAudit | None, graph: GraphAudit, fallen: set[str]
) -> Iterator[Change]:
    if one is None or other is None:
        kind, text = ("appeared", "there now") if one is None else ("disappeared", "not there any more")
        what = f"{name} part" if name else "whole graph on eager"
        sentence = f"the {what} of {_graph_name(graph)} is {text}"
        yield Change(kind=kind, what=what, graph=graph.identity, part=name, sentence=sentence)
        return
    rows, others = _live(one), _live(other)
    pairs, gone, new = paired_rows(rows, others)
    for old, row in pairs:
        yield from _rows(old, row, graph, fallen)
    whole = [row for row in rows if not row.parent], [row for row in others if not row.parent]
    if len(whole[0]) != len(whole[1]):
        before, after = (_lowerings(part) for part in whole)
        sentence = f"{name} of {_graph_name(graph)} is {_pieces(whole[1])}, and was {_pieces(whole[0])}"
        yield Change(
            kind="cut",
            what=f"{name} part",
            graph=graph.identity,
            part=name,
            before=before,
            after=after,
            sentence=sentence,
        )
        gone, new = [row for row in gone if row.parent], [row for row in new if row.parent]
    for row in gone:
        yield _alone(row, graph, "disappeared", "not there any more")
    for row in new:
        yield _alone(row, graph, "appeared", "there now")


def _alone(row: SubgraphAudit, graph: GraphAudit, kind: str, text: str) -> Change:
    name = f"the override call {row.id.rsplit('/', 1)[-1]}" if row.parent else f"a subgraph on {row.lowering}"
    gone = kind == "disappeared"
    return Change(
        kind=kind,
        what=name.removeprefix("the ").removeprefix("a "),
        sentence=f"{name} is {text}",
        graph=graph.identity,
        part=row.part,
        places=(row.identity,),
        before=row.lowering if gone else "",
        after="" if gone else row.lowering,
    )


def _rows(old: SubgraphAudit, row: SubgraphAudit, graph: GraphAudit, fallen: set[str]) -> Iterator[Change]:
    def change(kind: str, what: str, sentence: str, before: str, after: str, **more: Any) -> Change:
        about: dict[str, Any] = {"graph": graph.identity, "part": row.part, "places": (row.identity,), **more}
        return Change(kind=kind, what=what, sentence=sentence, before=before, after=after, **about)

    was, now = old.lowering, row.lowering
    if row.mismatch and not old.mismatch:
        yield change("mismatch", "subgraph", f"a subgraph was {row.difference}", was, now, reasons=row.reasons)
    elif now != was and not {old.id, row.id} & fallen:
        yield change("moved", "subgraph", f"a subgraph is on {now}, and was on {was}", was, now, reasons=row.reasons)
    if (old.ran is None) != (row.ran is None):
        was, now = ("was not called" if each.ran is None else "was called" for each in (old, row))
        yield change("not_called", "subgraph", f"a subgraph {now}, and {was} before", was, now)
    wrong = {v.name: v.detail for v in row.verifications if v.state == "wrong"}
    for name in sorted(set(wrong) - {v.name for v in old.verifications if v.state == "wrong"}):
        sentence = f"the override {name} was found to compute something else than its reference"
        yield change("wrong", name, sentence, "", wrong[name])


def _retreats(one: GraphAudit, other: GraphAudit) -> Iterator[Change]:
    def key(retreat: Retreat) -> Hashable:
        return (retreat.part, retreat.source_lowering, retreat.target_lowering, retreat.reason.code)

    _, new = difference(one.retreats, key, other.retreats, key)
    for retreat in new:
        source, target = retreat.source_lowering, retreat.target_lowering
        step = step_of(retreat)
        yield Change(
            kind="retreat",
            what=f"{retreat.part} part" if retreat.part else "graph",
            graph=other.identity,
            part=retreat.part,
            before=source,
            after=target,
            reasons=(retreat.reason,),
            sentence=f"{step} in {_graph_name(other)}",
        )


def _grouped(changes: Iterable[Change]) -> list[Change]:
    """Equal changes of several places as one."""
    found: dict[Hashable, Change] = {}
    for change in changes:
        codes = tuple((reason.code, reason.by) for reason in change.reasons)
        named = change.kind in ("appeared", "disappeared", "edited", "sizes", "cut")
        key = (change.kind, change.what, change.sentence, change.part, codes, change.graph if named else "")
        same = found.get(key)
        if same is None:
            found[key] = change
        else:
            places = tuple(dict.fromkeys((*same.places, *change.places)))[:_SHOWN]
            graph = same.graph if same.graph == change.graph else ""
            found[key] = dataclasses.replace(same, places=places, count=same.count + 1, graph=graph)
    return list(found.values())


def _by_graph(fallbacks: Iterable[Fallback]) -> dict[str, list[Fallback]]:
    found: dict[str, list[Fallback]] = {}
    for fallback in fallbacks:
        found.setdefault(fallback.graph, []).append(fallback)
    return found


def _live(part: PartAudit) -> list[SubgraphAudit]:
    return [row for row in part.subgraphs if not row.superseded]


def _lowerings(rows: Sequence[SubgraphAudit]) -> str:
    shown = [row.lowering or "unplanned" for row in rows[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else "")


def _pieces(rows: Sequence[SubgraphAudit]) -> str:
    return "one subgraph" if len(rows) == 1 else f"{len(rows)} subgraphs" if rows else "without a subgraph"


def _graph_name(graph: GraphAudit) -> str:
    """Name of a graph for a person: its function or module."""
    function = graph.function.partition(" ")[0]
    name = f"{graph.module}.{function}" if graph.module and function else graph.module or function or "graph"
    return f"{name}:{graph.variant}" if graph.variant else name


def _passes(one: GraphAudit, other: GraphAudit) -> Iterator[Change]:
    """The passes that rewrite fewer or more places, and the candidates that they leave alone."""

    def rewritten(item: Rewrite) -> Hashable:
        return (item.name, item.kind, item.module, item.target)

    def missed(item: NearMiss) -> Hashable:
        return (item.name, item.kind, item.module, item.reason.code)

    had, has = ({run.name: run.rewrites for run in graph.passes if run.applied} for graph in (one, other))
    for name in dict.fromkeys((*had, *has)):
        old, new = had.get(name), has.get(name)
        if (old is None) != (new is None):
            kind, text = ("pass_stopped", "does not run any more") if new is None else ("pass_started", "runs now")
            if old or new:
                yield Change(kind=kind, what=name, sentence=f"the pass {name} {text}", graph=other.identity)
    made, makes = ([item for item in graph.rewrites if not item.kept] for graph in (one, other))
    gone, new = difference(made, rewritten, makes, rewritten)
    counts = Counter(item.name for item in made), Counter(item.name for item in makes)
    for kind, items, text in (("pass_stopped", gone, "not rewritten any more"), ("pass_started", new, "rewritten now")):
        for item in items:
            target = f" to {item.target}" if item.target else ""
            yield Change(
                kind=kind,
                what=item.name,
                graph=other.identity,
                sentence=f"{item.name}: {item.kind}{target} is {text}",
                before=f"{counts[0][item.name]} rewrites",
                after=f"{counts[1][item.name]} rewrites",
                places=tuple(filter(None, (item.module or item.source,))),
            )
    # A pass may say how many places it rewrote without telling of each.
    told = set(counts[0]) | set(counts[1])
    for name in sorted((set(had) & set(has)) - told):
        old, now = had[name], has[name]
        if old != now:
            kind = "pass_stopped" if now < old else "pass_started"
            yield Change(
                kind=kind,
                what=name,
                graph=other.identity,
                before=f"{old} rewrites",
                after=f"{now} rewrites",
                sentence=f"{name} rewrites {now} places, and rewrote {old}",
            )
    gone_misses, new_misses = difference(one.near_misses, missed, other.near_misses, missed)
    for kind, misses in (("near_miss", new_misses), ("near_miss_gone", gone_misses)):
        for miss in misses:
            text = "has a new near miss" if kind == "near_miss" else "has one near miss less"
            yield Change(
                kind=kind,
                what=miss.name,
                graph=other.identity,
                sentence=f"{miss.name}: {miss.kind} {text}",
                places=tuple(filter(None, (miss.module or miss.source,))),
                reasons=(miss.reason,) if kind == "near_miss" else (),
            )


def _options(one: GraphAudit, other: GraphAudit) -> Iterator[Change]:
    """The options that took effect with another value."""
    had, has = ({s.key: s for s in graph.settings if s.key not in _OF_NO_EFFECT} for graph in (one, other))
    for key in dict.fromkeys((*had, *has)):
        old, new = had.get(key), has.get(key)
        asked = any(setting is not None and setting.requested for setting in (old, new))
        # A report of a version that does not know an option says nothing of its default.
        if (old is None or new is None) and not asked:
            continue
        before, after = _value(old), _value(new)
        if before != after:
            reason = new.reason if new is not None else None
            yield Change(
                kind="option",
                what=key,
                sentence=f"{key} is {after or 'not set'}, and was {before or 'not set'}",
                before=before,
                after=after,
                graph=other.identity,
                reasons=() if reason is None else (reason,),
            )
    if one.mode != other.mode:
        sentence = f"the mode is {other.mode}, and was {one.mode}"
        yield Change(kind="option", what="mode", sentence=sentence, before=one.mode, after=other.mode)


def _value(setting: Setting | None) -> str:
    return "" if setting is None else _ADDRESS.sub("", setting.effective or setting.requested)


def _environments(before: Report, after: Report) -> Iterator[Change]:
    """Versions and devices; the names of devices and platforms make no difference of their own."""
    old, new = before.environment, after.environment
    for name in sorted(set(old.versions) | set(new.versions)):
        was, now = old.versions.get(name, ""), new.versions.get(name, "")
        # What one of them does not tell can't be compared, as of another device's toolkit.
        if was and now and was != now:
            sentence = f"{name} is {now}, and was {was}"
            yield Change(kind="version", what=name, sentence=sentence, before=was, after=now)
    if before.graphs and after.graphs and set(old.devices) != set(new.devices):
        was, now = ", ".join(old.devices), ", ".join(new.devices)
        yield Change(
            kind="device", what="device", sentence=f"the device is {now}, and was {was}", before=was, after=now
        )
    named = {type: (old.devices[type], new.devices[type]) for type in old.devices if type in new.devices}
    facts = {**named, "platform": (", ".join(old.platforms), ", ".join(new.platforms))}
    for what, (was, now) in facts.items():
        if was and now and was != now:
            sentence = f"{what} is {now}, and was {was}"
            yield Change(kind="device", what=what, sentence=sentence, before=was, after=now, significant=False)


def _measures(before: Report, after: Report) -> tuple[Measure, ...]:
    """What was measured in both runs."""
    one, other = _measured(before), _measured(after)
    return tuple(
        Measure(name=name, unit=unit, before=one[name, unit], after=other[name, unit])
        for name, unit in one
        if (name, unit) in other
    )


def _over_threshold(
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


def _measured(audit: Report) -> dict[tuple[str, str], float]:
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


Item = TypeVar("Item")
Pairs = tuple[list[tuple[Item, Item]], list[Item], list[Item]]
"""The pairs, and what is in the first or the second alone."""

# Of two graphs of one name that are otherwise unlike, fewer operators than this part of all make one out of the other.
_ALIKE: Final = 0.3
_COMPARED: Final = 32


def paired_graphs(left: Sequence[GraphAudit], right: Sequence[GraphAudit]) -> Pairs[GraphAudit]:
    """The graphs of two reports: those of equal identity, of equal operators, and those that were edited."""
    pairs, rest, others = _paired(left, right, (lambda g: g.identity, lambda g: operators_of(g.identity)))
    by_place: dict[str, list[GraphAudit]] = {}
    for graph in others:
        by_place.setdefault(_place(graph), []).append(graph)
    lost: list[GraphAudit] = []
    for graph in rest:
        waiting = by_place.get(_place(graph), [])
        best = max(waiting[:_COMPARED], key=lambda other: _likeness(graph, other), default=None)
        if best is None or _likeness(graph, best) < _ALIKE:
            lost.append(graph)
        else:
            pairs.append((graph, best))
            waiting.remove(best)
    taken = {graph.id for _, graph in pairs}
    return pairs, lost, [graph for graph in others if graph.id not in taken]


def _place(graph: GraphAudit) -> str:
    return graph.identity.rpartition("/")[0]


def paired_rows(left: Sequence[SubgraphAudit], right: Sequence[SubgraphAudit]) -> Pairs[SubgraphAudit]:
    """The rows of two graphs that are one: of equal identity, of equal operators, or of the same place."""
    return _paired(
        left,
        right,
        (
            lambda row: row.identity,
            lambda row: operators_of(row.identity),
            # A part that is cut otherwise has several at one place: what stayed on its lowering did not move.
            lambda row: (row.identity.rpartition("/")[0], bool(row.parent), row.lowering),
            lambda row: (row.identity.rpartition("/")[0], bool(row.parent)),
        ),
    )


def operators(graph: GraphAudit) -> Counter[str]:
    """How many of each operator a graph has, after autograd, with the part."""
    found: Counter[str] = Counter()
    for row in graph.subgraphs:
        if not row.parent:
            found.update({f"{row.part} {op}": count for op, count in row.ops.items()})
    return found


def _likeness(left: GraphAudit, right: GraphAudit) -> float:
    """The part of all their operators that two graphs share, from 0 to 1; graphs that were never placed are alike."""
    one, other = operators(left), operators(right)
    total = (one | other).total()
    return (one & other).total() / total if total else 1.0


def _paired(left: Sequence[Item], right: Sequence[Item], keys: Sequence[Callable[[Item], Hashable]]) -> Pairs[Item]:
    """Pair items of equal keys, in order, trying one key after the other."""
    pairs: list[tuple[Item, Item]] = []
    rest, others = list(left), list(right)
    for key in keys:
        waiting: dict[Hashable, list[Item]] = {}
        for item in reversed(others):
            waiting.setdefault(key(item), []).append(item)
        unpaired: list[Item] = []
        for item in rest:
            found = waiting.get(key(item))
            if found:
                pairs.append((item, found.pop()))
            else:
                unpaired.append(item)
        taken = {id(other) for _, other in pairs}
        rest, others = unpaired, [item for item in others if id(item) not in taken]
    return pairs, rest, others


def difference(
    left: Iterable[Item], left_key: Callable[[Item], Hashable], right: Iterable[Item], key: Callable[[Item], Hashable]
) -> tuple[list[Item], list[Item]]:
    """The multiset differences by key: first without second, second without first."""
    waiting: dict[Hashable, list[Item]] = {}
    for item in left:
        waiting.setdefault(left_key(item), []).append(item)
    new: list[Item] = []
    for item in right:
        same = waiting.get(key(item))
        if same:
            same.pop(0)
        else:
            new.append(item)
    return [item for items in waiting.values() for item in items], new
