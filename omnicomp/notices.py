"""The one line that is shown by default: what of a compiled graph fell back, and why."""

import logging
import threading
from typing import Final

from omnicomp.once import harmless
from omnicomp.options import Policy
from omnicomp.timeline import Event, Placement, Retreat, current

__all__ = ["notify"]

log = logging.getLogger("omnicomp")

_SHOWN: Final = 3
_said: set[tuple[str, str]] = set()
_lock = threading.Lock()


def notify(graph: str, policy: Policy) -> None:
    """Log one WARNING for each part of the graph of which something fell back; nothing if nothing did.

    What the user chose (a policy without Inductor, say) is no fallback.
    """
    if policy.summary:
        with harmless("what fell back"):
            _notify(graph)


def _notify(graph: str) -> None:
    for event in current().events(graph):
        line = _line(event)
        part = getattr(event, "part", "")
        if line is None:
            continue
        with _lock:
            if (graph, part) in _said:
                continue
            _said.add((graph, part))
        log.warning("omni: %s; omnicomp.audit() has the whole story", line)


def _line(event: Event) -> str | None:
    if isinstance(event, Placement):
        fallen = [node for node in event.declined if node.lowering == "eager"]
        if not fallen:
            return None
        total = sum(event.nodes.values())
        shown = ", ".join(f"{n.op}{f' at {n.source}' if n.source else ''}" for n in fallen[:_SHOWN])
        more = f" and {len(fallen) - _SHOWN} more" if len(fallen) > _SHOWN else ""
        why = fallen[0].chain[-1].sentence if fallen[0].chain else ""
        name = f"{event.graph}.{event.part}"
        return f"{name}: {len(fallen)} of {total} operators run eager: {shown}{more} ({why})"
    if isinstance(event, Retreat) and not event.part:
        return f"{event.graph}: {event.source_lowering} gave way to {event.target_lowering}: {event.reason.sentence}"
    return None
