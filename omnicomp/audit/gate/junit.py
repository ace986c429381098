"""The verdict as JUnit XML: a test suite for each graph, a test case for each subgraph."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Final
from xml.etree import ElementTree

from omnicomp.audit.gate.verdict import STATES, Fallen, Verdict, levers, notes, why
from omnicomp.audit.model import GraphAudit, SubgraphAudit
from omnicomp.audit.views.rows import missing
from omnicomp.safety.escapes import one_line, xml

_LONGEST: Final = 10_000


def to_junit(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as one file.

    A subgraph fails if what counts in it is over the budget, or if it did not run as planned; it is skipped if it was
    given up with its graph, or was not called. The case `fallback budget` fails if and only if the report is over, the
    case `unfinished` if something has no end and that is not allowed; there is none where everything has one.
    """
    root = ElementTree.Element("testsuites", name="omnicomp")
    for verdict in verdicts:
        root.append(_budget(verdict))
        root.extend(_graph(verdict, graph) for graph in verdict.audit.graphs)
    found = notes(verdicts)
    if found:
        ElementTree.SubElement(root[0], "system-out").text = xml("\n".join(found))
    for count in ("tests", "failures", "skipped"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
    root.set("errors", "0")
    ElementTree.indent(root)
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _budget(verdict: Verdict) -> ElementTree.Element:
    case = _testcase("fallback budget", verdict.name or "omnicomp")
    if verdict.over:
        _add(case, "failure", verdict.summary(), map(_told, verdict.counted), "over the budget")
    else:
        _say(case, [one_line(verdict.summary())])
    return _suite(verdict.name or "omnicomp", [case, *_unfinished(verdict)])


def _unfinished(verdict: Verdict) -> Iterable[ElementTree.Element]:
    if not verdict.unfinished:
        return
    case = _testcase("unfinished", verdict.name or "omnicomp")
    told = list(map(one_line, missing(verdict.audit)))
    if verdict.is_unfinished:
        _add(case, "failure", verdict.unfinished[0].sentence, told, "unfinished")
    else:
        _say(case, told)
    yield case


def _graph(verdict: Verdict, graph: GraphAudit) -> ElementTree.Element:
    fallen: dict[str, list[Fallen]] = {}
    for item in verdict.fallen:
        if item.graph == graph.id:
            fallen.setdefault(item.subgraph, []).append(item)
    cases = [_case(verdict, graph, row, fallen.pop(row.id, [])) for row in graph.subgraphs]
    # Nodes of which the report does not say in which subgraph they are.
    cases += [_rest(verdict, graph, items) for items in fallen.values() if items]
    suite = _suite(" ".join(piece for piece in (verdict.name, graph.id, graph.function) if piece), cases)
    if graph.time > 0:
        suite.set("timestamp", _iso(graph.time))
    suite.set("time", f"{sum(graph.compile_seconds.values()):.3f}")
    return suite


def _iso(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    except (OverflowError, OSError, ValueError):  # no time that a calendar has
        return "1970-01-01T00:00:00"


def _suite(name: str, cases: Sequence[ElementTree.Element]) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=_attribute(name))
    suite.extend(cases)
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    suite.set("errors", "0")
    suite.set("skipped", str(sum(case.find("skipped") is not None for case in cases)))
    return suite


def _case(verdict: Verdict, graph: GraphAudit, row: SubgraphAudit, items: Sequence[Fallen]) -> ElementTree.Element:
    classname = row.module or graph.module or graph.function.partition(" ")[0] or graph.id
    case = _testcase(row.id, classname, f"{row.seconds:.3f}")
    counted = [item for item in items if item.state == "counts"]
    if row.mismatch:
        _add(case, "failure", f"did not run as planned: {row.difference}", map(_told, items), "mismatch")
    elif counted and verdict.over:
        _add(case, "failure", f"{row.id} runs eager", map(_told, counted), "fallback")
    elif row.superseded or row.ran is None:
        _add(case, "skipped", "given up with its graph" if row.superseded else "not called", ())
    told = [one_line(f"planned for {row.planned or 'nothing'}, ran on {row.ran or 'nothing'}")]
    told += [_told(item) for item in items if not (item in counted and case.find("failure") is not None)]
    _say(case, told)
    return case


def _rest(verdict: Verdict, graph: GraphAudit, items: Sequence[Fallen]) -> ElementTree.Element:
    case = _testcase(f"{graph.id} operators", graph.id)
    counted = [item for item in items if item.state == "counts"]
    if counted and verdict.over:
        _add(case, "failure", f"operators of {graph.id} run eager", map(_told, counted), "fallback")
    _say(case, map(_told, items))
    return case


def _testcase(name: str, classname: str, seconds: str = "0") -> ElementTree.Element:
    return ElementTree.Element("testcase", name=_attribute(name), classname=_attribute(classname), time=seconds)


def _say(case: ElementTree.Element, told: Iterable[str]) -> None:
    ElementTree.SubElement(case, "system-out").text = xml("\n".join(told))[:_LONGEST]


def _told(item: Fallen) -> str:
    """One fallback with its place, reasons and lever, and why it does not count, if so."""
    where = " ".join(piece for piece in (item.source, f"in {item.module}" if item.module else "") if piece)
    text = f"{item.name}{f' at {where}' if where else ''}: {why(item.reasons) or 'no reason was recorded'}"
    text += f". To change this: {levers(item.reasons)}" if levers(item.reasons) else ""
    if item.state != "counts":
        text += f" [{STATES[item.state]}{f': {item.why}' if item.why else ''}]"
    return one_line(text)


def _attribute(text: str) -> str:
    return xml(one_line(text))


def _add(case: ElementTree.Element, tag: str, message: str, body: Iterable[str], kind: str = "") -> None:
    element = ElementTree.SubElement(case, tag, message=_attribute(message)[:_LONGEST])
    if kind:
        element.set("type", kind)
    element.text = xml("\n".join(body))[:_LONGEST]
