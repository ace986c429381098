"""The warning that is logged by default: which operators of a compiled graph fell back, and why."""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from omnicomp._torch.dynamo import control_flow
from omnicomp.errors import FallbackError, harmless
from omnicomp.lowerings.base import LoweringContext
from omnicomp.options.fallback_limits import FallbackBudget
from omnicomp.options.placement_rules import selects
from omnicomp.options.policy import Policy
from omnicomp.safety.escapes import one_line
from omnicomp.safety.forks import new_lock
from omnicomp.safety.privacy import logger
from omnicomp.timeline import Capture, Event, NodePlacement, Placement, Retreat, current

if TYPE_CHECKING:
    from omnicomp.audit.gate.verdict import Verdict  # views are imported when there is something to see


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
            from omnicomp.options.acknowledged import load_and_tell

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
        eager = [node for node in event.declined if node.lowering == "eager" and not _asked_for(node)]
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
        return f"{event.graph}: {event.source_lowering} retreated to {event.target_lowering}: {event.reason.sentence}"
    return None


def _asked_for(node: NodePlacement) -> bool:
    """Whether a node is on eager's kernel because the option `numerics` asks for its values."""
    return bool(node.chain) and node.chain[-1].code == "not_exact"


_KEY: Final = "the fallback budget"
_RAN_EAGER: Final = ("ran", "eager")
Boxed = Callable[[list[Any]], Sequence[Any]]


class _Watch:
    """One graph with a budget.

    Attributes:
        changed: whether something was recorded of it that may be a fallback, since it was last judged.
    """

    def __init__(self, graph: str, budget: FallbackBudget) -> None:
        self.changed = False
        self._graph, self._budget = graph, budget
        self._told = 0
        self._error = ""
        self._lock = new_lock()

    def before(self) -> None:
        """Refuse a call of a graph that is known to be over its budget, where that is an error."""
        if self._error:
            raise control_flow.user_error(FallbackError(self._error))

    def judge(self) -> None:
        """Judge the graph by its events so far.

        Raises:
            FallbackError: it is over its budget, and that is an error.
        """
        self.changed = False
        with harmless("whether a graph is within its fallback budget"):
            self._judge()
        self.before()

    def _judge(self) -> None:
        verdict = _verdict(self._graph, self._budget)
        with self._lock:
            if not verdict.over or verdict.nodes <= self._told:
                return
            self._told = verdict.nodes
        from omnicomp.audit.gate.verdict import message

        if self._budget.on_excess == "error":
            self._error = message(verdict, self._graph)
        else:
            suppress(self._graph)
            log.warning("omni: %s", message(verdict, self._graph))


def _verdict(graph: str, budget: FallbackBudget) -> "Verdict":
    from omnicomp.audit.fold import fold
    from omnicomp.audit.gate.judge import judge
    from omnicomp.options.acknowledged import load_and_tell

    audit = fold(current().events(graph))
    verdict = judge(audit, budget)
    return judge(audit, budget, acknowledged=load_and_tell()) if verdict.over else verdict


class _Sink:
    """Notes which graphs had something recorded that may be a fallback."""

    def __init__(self) -> None:
        self.open = True

    def write(self, record: dict[str, Any]) -> None:
        watch, kind = _watches.get(record["graph"]), record["type"]
        if watch is not None and (kind in ("retreat", "placement") or (kind, record.get("lowering")) == _RAN_EAGER):
            watch.changed = True

    def close(self) -> None:
        self.open = False


_watches: "weakref.WeakValueDictionary[str, _Watch]" = weakref.WeakValueDictionary()
_sink = _Sink()


def _attend() -> None:
    """Listen to the timeline; it drops its listeners when it is cleared."""
    global _sink
    timeline = current()
    if not timeline.has_sink(_KEY):
        _sink = _Sink()
        timeline.add_sink(_KEY, _sink)


def _watch(graph: str, policy: Policy) -> _Watch | None:
    if policy.fallback is None:
        return None
    watch = _watches.get(graph)
    if watch is None:
        watch = _watches[graph] = _Watch(graph, policy.fallback)
    return watch


def judge_graph(graph: str, policy: Policy) -> None:
    """Judge a graph, a part of which was just built; nothing where the policy has no budget.

    Raises:
        FallbackError: it is over its budget, and that is an error.
    """
    watch = _watch(graph, policy)
    if watch is not None:
        _attend()
        watch.judge()


def enforce(compiled: Callable[..., Any], graph: str, policy: Policy) -> Callable[..., Any]:
    """Judge a graph that was compiled, and have it judged again when a call of it as a whole moves to eager.

    Args:
        compiled: a function of the graph's inputs; returned as it is where the policy has no budget.
        graph: its id.
        policy: of the graph.

    Raises:
        FallbackError: it is over its budget, and that is an error.
    """
    watch = _watch(graph, policy)
    if watch is None:
        return compiled
    _attend()
    watch.judge()

    def budgeted(*args: Any) -> Any:
        if not _sink.open:
            _attend()
        watch.before()
        results = compiled(*args)
        if watch.changed:
            watch.judge()
        return results

    return budgeted


def within_budget(call: Boxed, context: LoweringContext) -> Boxed:
    """The callable of a part or of a piece of one, judged again when it moves to eager; itself without a budget.

    A backward is called by autograd, and not from inside what `enforce` returns.
    """
    watch = _watch(context.graph_id, context.policy)
    if watch is None or context.part != "backward":
        return call

    def budgeted(inputs: list[Any]) -> Sequence[Any]:
        watch.before()
        outputs = call(inputs)
        if watch.changed:
            watch.judge()
        return outputs

    budgeted._boxed_call = True  # type: ignore[attr-defined]
    return budgeted
