"""A bound on the time that a part takes to build, and what is done when it is used up.

There is no search by building again: each build could take all of the time. What took at least half of it by itself, a
node or a kernel, is to blame, and leaves Inductor; if nothing did, everything leaves that is not built yet.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence

from torch.fx import Node

from omnicomp._torch.inductor.build_clock import AUTOTUNING
from omnicomp._torch.inductor.time_limit import Meter, autotunes, building, failure_of_autotuning, without_autotuning
from omnicomp.analysis.nodes import op_name, source_line
from omnicomp.builder.find_failing import Verdict
from omnicomp.errors import BudgetSpentError, first_line
from omnicomp.timeline import Reason

__all__ = ["PartBudget"]

# Of the allowed seconds, what a node or kernel must have taken by itself to be blamed alone.
_SHARE = 0.5


class PartBudget:
    """The time that one part may take to build on Inductor, and whether choices are measured in it.

    The time counts for all builds of the part together, bisection included. When it is used up, it may begin afresh
    twice: once without autotuning, if most of it went on that, and once without the nodes that are to blame. So a part
    takes at most three times as long as allowed.
    """

    def __init__(self, seconds: float | None) -> None:
        """Begin with nothing used.

        Args:
            seconds: the option `build_seconds`; None for no bound.
        """
        self._seconds = seconds
        self._meter = None if seconds is None else Meter(seconds)
        self._tunes = True
        self._blamed = False
        self._unbounded: set[str] = set()
        self.changed = False
        """Whether the part is not what it would be with more time or memory; caches must not take it for that."""

    def know(self, *, slow: bool, untuned: bool) -> None:
        """Begin where an earlier build ended.

        Args:
            slow: whether nodes left Inductor as there was no time for them.
            untuned: whether there was no time for autotuning, or it failed.
        """
        self.changed = self.changed or slow or untuned
        self._blamed = self._blamed or slow
        self._tunes = self._tunes and not untuned

    @contextlib.contextmanager
    def building(self, nodes: Sequence[Node]) -> Generator[None]:
        """Build nodes on Inductor inside.

        Raises:
            BudgetSpentError: the time is used up.
        """
        with contextlib.ExitStack() as stack:
            if not self._tunes:
                stack.enter_context(without_autotuning())
            if self._meter is not None and not all(node.name in self._unbounded for node in nodes):
                stack.enter_context(building(self._meter))
            yield

    def verdict(self, nodes: Sequence[Node], error: Exception, movable: Callable[[Node], bool]) -> Verdict | None:
        """What to change, if time or autotuning is why a build failed; None otherwise.

        Args:
            nodes: what was being built.
            error: what was raised.
            movable: whether another lowering takes a node.
        """
        if not isinstance(error, BudgetSpentError) or self._meter is None:
            failure = failure_of_autotuning(error) if self._tunes and autotunes() else None
            if failure is None:
                return None
            self.know(slow=False, untuned=True)
            return Verdict(cut={}, error=error, untuned=_untunable(failure))
        meter, self.changed = self._meter, True
        if self._tunes and autotunes() and max(meter.phases, key=meter.phases.__getitem__) == AUTOTUNING:
            self._tunes, self._meter = False, Meter(meter.allowed)
            reason = self._reason(meter, "Inductor builds it again without autotuning")
            return Verdict(cut={}, error=error, untuned=reason, seconds=meter.allowed)
        blamed = () if self._blamed else _blamed(nodes, meter)
        leaving = [node for node in blamed if movable(node)]
        if leaving and len(leaving) < len(nodes):
            self._blamed, self._meter = True, Meter(meter.allowed)
            kernel = "" if len(leaving) == 1 else f" and the {len(leaving) - 1} others of its kernel"
            said = f"this node{kernel} took most of that"
        else:
            leaving = [node for node in nodes if movable(node)]
            said = "no node is to blame alone, so all that was not built leaves" if len(leaving) > 1 else ""
            # What no other lowering takes is built, however long it takes.
            self._unbounded.update(node.name for node in nodes)
        reason = self._reason(meter, said)
        cut = {node.name: _at(reason, node) for node in leaving}
        return Verdict(cut=cut, error=error, seconds=meter.allowed)

    def _reason(self, meter: Meter, said: str) -> Reason:
        phases = sorted(meter.phases.items(), key=lambda item: -item[1])
        spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases if seconds >= 0.05)
        at = f"; under way was {meter.at}" if meter.at else ""
        tuning = ", or set max_autotune=False" if AUTOTUNING in meter.phases else ""
        return Reason(
            code="budget_spent",
            by="inductor",
            sentence=f"building took {meter.used:.1f} s, and {meter.allowed:g} s are allowed: {spent or 'nothing yet'}"
            f"{at}{f'; {said}' if said else ''}",
            observed=f"{meter.used:.1f} s",
            needed=f"at most {meter.allowed:g} s",
            lever=f"allow more with options={{'build_seconds': ...}}{tuning}",
        )


def _blamed(nodes: Sequence[Node], meter: Meter) -> list[Node]:
    """The node, or the nodes of the one kernel, that took at least half of the time by itself."""
    least = meter.allowed * _SHARE
    slowest = max(meter.nodes, key=meter.nodes.__getitem__, default=None)
    if slowest is not None and meter.nodes[slowest] >= least:
        return [node for node in nodes if node.name == slowest.name and node.target == slowest.target]
    kernel = max(meter.kernels, key=meter.kernels.__getitem__, default="")
    if kernel and meter.kernels[kernel] >= least:
        return [node for node in nodes if node.name in meter.origins.get(kernel, ())]
    return []


def _at(reason: Reason, node: Node) -> Reason:
    return dataclasses.replace(reason, node=f"{node.name} ({op_name(node)})", source=source_line(node))


def _untunable(error: BaseException) -> Reason:
    return Reason(
        code="build_failed",
        by="inductor",
        sentence=f"autotuning failed, and Inductor builds the part again without it: {first_line(error)}",
        observed=type(error).__name__,
        lever="set max_autotune=False, or free memory",
    )
