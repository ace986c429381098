"""The option `fallback`: a warning or an error for a graph that falls back more than its budget allows.

A graph is judged when its parts are built, or restored from a cache, and again when something of it moved to eager in a
call. The timeline tells what happened, and the report that is made of it is judged like any other (`audit/gate.py`), so
that the budget, the audit and `omnicomp check` count the same. Nothing here changes what is compiled.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from omnicomp._torch.dynamo import control_flow
from omnicomp.errors import FallbackError, harmless
from omnicomp.forks import new_lock
from omnicomp.lowerings.base import LoweringContext
from omnicomp.options.acknowledged import load_and_tell
from omnicomp.options.fallback_limits import FallbackBudget
from omnicomp.options.policy import Policy
from omnicomp.privacy import logger
from omnicomp.runtime.fallback_warning import suppress
from omnicomp.timeline import current

if TYPE_CHECKING:
    from omnicomp.audit.gate.verdict import Verdict  # views are imported when there is something to see

__all__ = ["enforce", "judge_graph", "within_budget"]

log = logger("omnicomp")

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

    Args:
        graph: its id.
        policy: of the graph.

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

    Args:
        call: a boxed callable.
        context: where it belongs.
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
