"""The timeline as log lines: decisions by `TORCH_LOGS="omnicomp"`, details by `"+omnicomp"`.

Every line goes to a logger below `omnicomp`, so that Python's own configuration of loggers works as well.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from omnicomp._torch.structured import register
from omnicomp.safety.escapes import one_line
from omnicomp.safety.privacy import logger
from omnicomp.timeline.recorder import Timeline

_KEY: Final = "the loggers of omnicomp"

LOGGERS: Final[dict[str, str]] = {
    "capture": "capture",
    "option": "options",
    "pass_run": "passes",
    "rewrite": "passes",
    "near_miss": "passes",
    "speculation": "speculation",
    "calibration": "calibration",
    "placement": "placement",
    "subgraph": "placement",
    "attempt": "lowerings",
    "retreat": "lowerings",
    "ran": "execution",
    "verification": "execution",
    "cache": "caches",
}
"""The logger below `omnicomp` for each type of event; the lines of other types go to `omnicomp.timeline`."""

Record = Mapping[str, Any]
register("omnicomp")


class LogSink:
    """Writes a line for each event whose level is enabled."""

    def __init__(self) -> None:
        self._loggers = {kind: logger(f"omnicomp.{name}") for kind, name in LOGGERS.items()}
        self._other = logger("omnicomp.timeline")

    @property
    def wanted(self) -> bool:
        """Whether any of the loggers takes lines below a warning."""
        return any(log.isEnabledFor(logging.INFO) for log in (*self._loggers.values(), self._other))

    def write(self, record: dict[str, Any]) -> None:
        """Take one event."""
        kind = record["type"]
        log = self._loggers.get(kind, self._other)
        if not log.isEnabledFor(logging.INFO):
            return
        if kind in _TEMPLATES:
            level, template = _TEMPLATES[kind]
            line = template.format(**record, where=_where(record), at=_at(record), why=_why(record))
        else:
            level, line = _LINES.get(kind, _detail)(record)
        if log.isEnabledFor(level):
            log.log(level, "%s", one_line(line))
        for node in record.get("declined", ()) if log.isEnabledFor(logging.DEBUG) else ():
            why = "; ".join(f"{reason.get('by', '')}: {reason.get('sentence', '')}" for reason in node["chain"])
            where = f"{_where(record)}: {node['node']} ({node['op']}){_at(node)}"
            log.debug("%s", one_line(f"{where} on {node['lowering']}: {why}"))

    def close(self) -> None:
        """Nothing is held."""


def attach(timeline: Timeline) -> None:
    """Add the sink, if somebody reads the lines."""
    if not timeline.has_sink(_KEY):
        sink = LogSink()
        if sink.wanted:
            timeline.add_sink(_KEY, sink)


def _where(record: Record) -> str:
    part = record.get("part")
    return record.get("subgraph") or (f"{record['graph']}.{part}" if part else record["graph"])


def _at(record: Record) -> str:
    return f" at {record['source']}" if record.get("source") else ""


def _why(record: Record) -> str:
    return (record.get("reason") or {}).get("sentence", "")


def _capture(record: Record) -> tuple[int, str]:
    facts = [f"{record['nodes']} operators", f"device {record['device']}"]
    facts += [f"compile id {record['compile_id']}"] if record["compile_id"] else []
    facts += [name for name in ("training", "dynamic") if record[name]]
    return logging.INFO, f"{record['graph']} {record['function']}: {', '.join(facts)}"


def _pass_run(record: Record) -> tuple[int, str]:
    did = f"rewrote {record['rewrites']} places" if record["modified"] else "changed nothing"
    level = logging.INFO if record["modified"] else logging.DEBUG
    return level, f"{record['graph']}: {record['name']} {did} in {record['seconds']:.3f} s. {record['note']}"


def _placement(record: Record) -> tuple[int, str]:
    nodes = ", ".join(f"{count} on {lowering}" for lowering, count in record["nodes"].items())
    return logging.INFO, f"{_where(record)}: {nodes or 'no operators'}"


def _attempt(record: Record) -> tuple[int, str]:
    if record["ok"]:
        level = logging.INFO if record["selected"] else logging.DEBUG
        built = f"{record['lowering']} built it in {record['seconds']:.3f} s"
        return level, f"{_where(record)}: {built} {record['artefact']}"
    level = logging.INFO if _why(record) else logging.DEBUG
    return level, f"{_where(record)}: not on {record['lowering']}: {_why(record) or record['skipped']}"


def _cache(record: Record) -> tuple[int, str]:
    why = "; ".join(piece for piece in (record["note"], *record["changed"]) if piece)
    return logging.INFO, f"{_where(record)}: {record['cache']} {record['verdict']}{f': {why}' if why else ''}"


def _detail(record: Record) -> tuple[int, str]:
    left_out = ("schema", "type", "time", "seq", "pid", "rank", "thread", "graph", "part", "subgraph")
    fields = ", ".join(f"{key}={value}" for key, value in record.items() if key not in left_out and value)
    return logging.DEBUG, f"{_where(record)}: {record['type']}: {fields}"


# Of those that need no more than their fields; `where`, `at` and `why` are worked out of these.
_TEMPLATES: Final[dict[str, tuple[int, str]]] = {
    "option": (logging.INFO, "{graph}: option {key} is {effective}, not {requested}: {why}"),
    "rewrite": (logging.DEBUG, "{graph}: {name} rewrote {node}{at} to {target}. {detail}"),
    "near_miss": (logging.DEBUG, "{graph}: {name} left {node}{at}: {why}"),
    "retreat": (logging.INFO, "{where}: {source_lowering} retreated to {target_lowering}: {why}"),
    "ran": (logging.INFO, "{where}: ran on {lowering}: {evidence}"),
    "verification": (logging.INFO, "{where}: {name} is {state}: {detail}"),
}
_LINES: Final[dict[str, Callable[[Record], tuple[int, str]]]] = {
    "capture": _capture,
    "pass_run": _pass_run,
    "placement": _placement,
    "attempt": _attempt,
    "cache": _cache,
}
