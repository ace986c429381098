"""What a reader of a report may want to change: each cause once, the most urgent first, with all its places."""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Final

from omnicomp.audit.model import GraphAudit, Report, SubgraphAudit
from omnicomp.audit.views import rows
from omnicomp.timeline import Reason, Retreat
from omnicomp.timeline.reasons import RECOMPILE_LIMIT

KINDS: Final = {
    "mismatch": "not as planned",
    "fallback": "fallback",
    "retreat": "retreat",
    "failure": "failed build",
    "graph_break": "graph break",
    "near_miss": "near miss",
    "refusal": "refusal",
    "assumption": "assumption not checked",
    "option": "option not as requested",
    "cache": "cache bypass",
}
"""The kinds of findings in the order of their urgency, and what each is called (`docs/glossary.md`)."""

# Layers have the same cause where names differ in the numbers in them: `softmax_1`, `g0.forward.2`, `layers.3`.
_NUMBERS: Final = re.compile(r"(?<=\bg)\d+|(?<=[A-Za-z])_\d+\b|(?<=[A-Za-z]\.)\d+\b")
_MOST_PLACES: Final = 3
_STEPS: Final = ("retreat", "failure")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause, and where it holds."""

    kind: str
    what: str
    reasons: tuple[Reason, ...] = ()
    sources: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    graphs: tuple[str, ...] = ()
    lowering: str = ""

    @property
    def count(self) -> int:
        """How many places it has: of a graph break, lines."""
        return max(len(self.sources), 1) if self.kind == "graph_break" else len(self.ids)

    @property
    def title(self) -> str:
        """`fallback: aten.digamma.default on eager at model.py:7 (4 places)`."""
        what = f": {self.what}" if self.what else ""
        where = f" {'at ' if self.sources else 'in '}{self.where}" if self.where else ""
        places = f" ({self.count} places)" if self.count > 1 else ""
        return f"{KINDS[self.kind]}{what}{where}{places}"

    @property
    def where(self) -> str:
        """`model.py:9, model.py:12 and 3 more in layers.0.attn, layers.1.attn`."""
        lines = _listed(rows.short_source(source) for source in self.sources)
        modules = _listed(self.modules)
        return " in ".join(piece for piece in (lines, modules) if piece)


def _listed(names: Iterable[str]) -> str:
    found = list(dict.fromkeys(name for name in names if name))
    more = f" and {len(found) - _MOST_PLACES} more" if len(found) > _MOST_PLACES else ""
    return ", ".join(found[:_MOST_PLACES]) + more


def findings(audit: Report) -> list[Finding]:
    """Everything that is not as it might be; equal causes of several places are one."""
    grouped: dict[object, list[Finding]] = {}
    for one in _all(audit):
        key = (one.kind, one.lowering, _unnumbered(one.what), _causes(one))
        grouped.setdefault(key, []).append(one)
    # The retreat of a part is the fallback of its operators: what is said of these is not said again.
    said = {cause for same in grouped.values() if same[0].kind not in _STEPS for cause in _causes(same[0])}
    found = [_merged(same) for same in grouped.values() if same[0].kind not in _STEPS or not _causes(same[0]) <= said]
    return sorted(found, key=lambda one: list(KINDS).index(one.kind))


def counted(found: Iterable[Finding]) -> str:
    """`1 fallback, 2 near misses`: how many places there are of each kind."""
    counts: dict[str, int] = {}
    for one in found:
        counts[one.kind] = counts.get(one.kind, 0) + one.count
    return ", ".join(f"{count} {_plural(KINDS[kind], count)}" for kind, count in counts.items())


def _plural(name: str, count: int) -> str:
    if count == 1 or name.startswith("not "):
        return name
    noun, _, rest = name.partition(" not ")
    return f"{noun}{'es' if noun.endswith('s') else 's'}{f' not {rest}' if rest else ''}"


def _unnumbered(text: str) -> str:
    return _NUMBERS.sub("", text)


def _causes(one: Finding) -> frozenset[object]:
    """The reasons without places; two that differ in numbers of nodes alone are the same."""
    return frozenset(
        (r.code, r.by, *map(_unnumbered, (r.sentence, r.observed, r.needed, r.lever))) for r in one.reasons
    )


def _merged(same: list[Finding]) -> Finding:
    return dataclasses.replace(
        same[0],
        sources=tuple(dict.fromkeys(source for each in same for source in each.sources)),
        modules=tuple(dict.fromkeys(module for each in same for module in each.modules)),
        ids=tuple(dict.fromkeys(id for each in same for id in each.ids)),
        graphs=tuple(dict.fromkeys(graph for each in same for graph in each.graphs)),
    )


def _all(audit: Report) -> Iterator[Finding]:
    for fallback in audit.fallbacks:
        names = fallback.op.split(", ")
        op = f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        what = f"{fallback.subgraph} ({op})" if fallback.subgraph and op else fallback.subgraph or op
        id = fallback.subgraph or f"{fallback.graph}.{fallback.part}:{fallback.node}"
        place = {"graph": fallback.graph, "source": fallback.source, "module": fallback.module, "id": id}
        yield _one("fallback", f"{what} on eager", fallback.reasons, lowering="eager", **place)
    for file in audit.artefacts:
        if file.reason is not None:
            yield _one("cache", f"artefacts {file.state}", (file.reason,), graph="", id=file.path)
    for graph in audit.graphs:
        yield from _of_graph(graph)
        for part in graph.parts:
            for node in part.declined:
                if node.lowering != "eager":
                    place = {"graph": graph.id, "source": node.source, "module": node.module}
                    what, id = f"{node.op} on {node.lowering}", f"{graph.id}.{part.name}:{node.node}"
                    yield _one("refusal", what, node.chain, lowering=node.lowering, id=id, **place)
            for row in part.subgraphs:
                yield from _of_row(row)


def _of_graph(graph: GraphAudit) -> Iterator[Finding]:
    for retreat in graph.retreats:
        yield _retreat(retreat)
    for attempt in graph.attempts:
        if attempt.reason is not None:
            what = f"{attempt.lowering} did not build {attempt.subgraph}"
            yield _one("failure", what, (attempt.reason,), graph=graph.id, id=attempt.subgraph)
    for miss in graph.near_misses:
        if miss.reason.code == RECOMPILE_LIMIT:
            continue  # a fallback
        broken = miss.reason.code == "graph_break"
        what = "" if broken else miss.kind.replace("_", " ")
        if miss.reason.code == "error_bound":
            what = f"{miss.node if miss.reason.node else 'operators'} kept wide"
        # Two variants of one graph have the same places.
        id = f"{graph.id.replace(f':{graph.variant}', '')}:{miss.node}"
        kind = "graph_break" if broken else "near_miss"
        yield _one(kind, what, (miss.reason,), graph=graph.id, source=miss.source, module=miss.module, id=id)
    for event in graph.speculations:
        if event.reason is not None and event.reason.code == "check_failed":
            yield _one("assumption", event.sentence, (event.reason,), graph=graph.id, source=event.source)
    for option in graph.ineffective:
        what = f"{option.key} is {option.effective}, not {option.requested}"
        yield _one("option", what, (option.reason,), graph=graph.id, id=f"option:{graph.id}:{option.key}")
    for cache in graph.caches:
        if cache.reason is not None:
            yield _one("cache", f"{cache.cache} {cache.verdict}", (cache.reason,), graph=graph.id, id=cache.subgraph)


def _of_row(row: SubgraphAudit) -> Iterator[Finding]:
    place = {"graph": row.graph, "source": next(iter(row.sources), ""), "module": row.module, "id": row.id}
    if row.mismatch:
        yield _one("mismatch", f"{row.id} was {row.difference}", row.reasons, lowering=row.lowering, **place)
        return
    for retreat in row.retreats:
        yield _retreat(retreat, **place)
    for attempt in row.attempts:
        if attempt.reason is not None:
            what = f"{attempt.lowering} did not build {row.id}"
            yield _one("failure", what, (attempt.reason,), lowering=row.lowering, **place)


def _retreat(retreat: Retreat, **place: str) -> Finding:
    what = f"{retreat.subgraph}: {rows.step_of(retreat)}"
    where = {"graph": retreat.graph, "id": retreat.subgraph, **place}
    return _one("retreat", what, (retreat.reason,), lowering=retreat.target_lowering, **where)


def _one(
    kind: str,
    what: str,
    reasons: Iterable[Reason],
    *,
    graph: str,
    source: str = "",
    module: str = "",
    id: str = "",
    lowering: str = "",
) -> Finding:
    why = tuple(dict.fromkeys(reasons))
    source = source or next((reason.source for reason in why if reason.source), "")
    return Finding(
        kind=kind,
        what=what,
        reasons=why,
        sources=(source,) if source else (),
        modules=(module,) if module else (),
        ids=(id or graph,),
        graphs=(graph,),
        lowering=lowering,
    )
