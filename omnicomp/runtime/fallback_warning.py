"""The warning that is logged by default: which operators of a compiled graph fell back, and why."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from omnicomp.errors import harmless
from omnicomp.escapes import one_line
from omnicomp.forks import new_lock
from omnicomp.options.acknowledged import load_and_tell
from omnicomp.options.policy import Policy
from omnicomp.options.selectors import selects
from omnicomp.privacy import logger
from omnicomp.timeline import Capture, Event, NodePlacement, Placement, Retreat, current

__all__ = ["notify", "suppress"]

log = logger("omnicomp")

_SHOWN: Final = 3
_said: set[tuple[str, str]] = set()
_lock = new_lock()


def notify(graph: str, policy: Policy) -> None:
    """Log one WARNING for each part of the graph in which an operator fell back.

    What the user chose (a policy without Inductor, say) is no fallback. What the option `fallback` allows, or the
    project acknowledges, is left out; a part with no other fallback logs nothing.
    """
    if policy.summary:
        with harmless("what fell back"):
            _notify(graph, policy.fallback.allow if policy.fallback is not None else ())


def suppress(graph: str) -> None:
    """Suppress the warning for the parts that a graph has by now: a fuller one was logged."""
    with _lock:
        _said.update((graph, getattr(event, "part", "")) for event in current().events(graph))


def _notify(graph: str, allowed: Sequence[str]) -> None:
    events = current().events(graph)
    function = next((e.function.partition(" ")[0] for e in events if isinstance(e, Capture)), "")
    known: list[str] | None = None

    def is_known(event: Event, node: NodePlacement | None) -> bool:
        nonlocal known
        if known is None:  # a file is read only if something fell back
            known = [*allowed, *(entry.selector for entry in load_and_tell().entries)]
        where: dict[str, Any] = {"ids": (graph, f"{graph}.{getattr(event, 'part', '')}"), "function": function}
        if node is None:
            return any(selects(selector, "", **where) for selector in known)
        modules = (node.module,) if node.module else ()
        return any(selects(selector, node.op, node=node.node, modules=modules, **where) for selector in known)

    for event in events:
        line = _line(event, is_known)
        part = getattr(event, "part", "")
        if line is None:
            continue
        with _lock:
            if (graph, part) in _said:
                continue
            _said.add((graph, part))
        log.warning("omni: %s; omnicomp.audit() has the whole story", one_line(line))


def _line(event: Event, is_known: Callable[[Event, NodePlacement | None], bool]) -> str | None:
    if isinstance(event, Placement):
        eager = [node for node in event.declined if node.lowering == "eager"]
        fallen = [node for node in eager if not is_known(event, node)]
        if not fallen:
            return None
        total = sum(event.nodes.values())
        shown = ", ".join(f"{n.op}{f' at {n.source}' if n.source else ''}" for n in fallen[:_SHOWN])
        more = f" and {len(fallen) - _SHOWN} more" if len(fallen) > _SHOWN else ""
        why = fallen[0].chain[-1].sentence if fallen[0].chain else ""
        known = f"; {len(eager) - len(fallen)} more are acknowledged" if len(eager) > len(fallen) else ""
        name = f"{event.graph}.{event.part}"
        return f"{name}: {len(fallen)} of {total} operators run eager: {shown}{more} ({why}){known}"
    if isinstance(event, Retreat) and not event.part and not is_known(event, None):
        return f"{event.graph}: {event.source_lowering} gave way to {event.target_lowering}: {event.reason.sentence}"
    return None
