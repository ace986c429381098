"""Overrides of modules and searches that stand behind other lowerings in the order.

Such an override enters a Dynamo graph before autograd, and whether the lowerings before it refuse anything is known
only when a part is placed, or could not be built. So the graph is compiled without it first. If a node is left over
that it would take, `LateOverrides` is raised, and the graph is compiled again with it.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from typing import Final

import torch
from torch.fx import Node

from omnicomp.errors import first_line
from omnicomp.lowerings.base import GraphRecord, LateMatch, LoweringContext, names_in_order
from omnicomp.lowerings.overrides.declaration import Override
from omnicomp.lowerings.overrides.rewrite import declined_at
from omnicomp.options.placement_rules import last_match
from omnicomp.timeline import NodePlacement, Reason

_local: Final = threading.local()
# What autograd puts behind operators of the program; refusing it says nothing of a module.
_AUTOGRADS: Final = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class LateOverrides(BaseException):
    """The graph is to be compiled again with these overrides; raised only inside `restartable`.

    It is no `Exception`: those lead to the next lowering.
    """

    def __init__(self, matches: Mapping[LateMatch, tuple[Reason, ...]]) -> None:
        super().__init__(", ".join(match.override for match in matches))
        self.matches = matches


@contextlib.contextmanager
def restartable() -> Generator[None]:
    """Inside, a compilation of this thread may raise `LateOverrides`."""
    before = can_restart()
    _local.restartable = True
    try:
        yield
    finally:
        _local.restartable = before


def can_restart() -> bool:
    """Whether this thread is inside `restartable`."""
    return getattr(_local, "restartable", False)


def left_for(nodes: Iterable[Node], context: LoweringContext) -> dict[LateMatch, Node]:
    """The matches that would take one of these nodes of a part, with the first such node."""
    found: dict[LateMatch, Node] = {}
    for node in nodes if context.graph.late else ():
        if node.target in _AUTOGRADS:
            continue
        # The names of the nodes of the Dynamo graph that it was made of, or that it is a derivative of.
        stack = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack") or ()
        names = {str(entry[0]) for entry in stack}
        for match in context.graph.late:
            if names & match.nodes:
                found.setdefault(match, node)
    return found


def too_late(match: LateMatch, node: Node, context: LoweringContext) -> NodePlacement:
    """Why an override does not take a node, if the graph can't be compiled again."""
    reason = Reason(
        code="override_refused",
        by=match.override,
        sentence="it enters a graph before autograd, and this part is built when the rest of the graph is in use",
        lever=f'name "override" before {", ".join(_before(context))} in the order',
    )
    return declined_at(node, reason, context)


def _before(context: LoweringContext) -> tuple[str, ...]:
    names = names_in_order(context.policy.lowerings, context.device.lowerings)
    return names[: names.index("override")] if "override" in names else ()


def raise_late(graph: GraphRecord, error: Exception, by: str) -> None:
    """Raise `LateOverrides` with all overrides that may still enter, where something can't be compiled as a whole."""
    matches = [match for match in graph.late if match.declined is None]
    if matches:
        reason = Reason(
            code="build_failed",
            by=by,
            sentence=f"the graph can't be compiled without them: {first_line(error)}",
            observed=type(error).__name__,
        )
        raise LateOverrides(dict.fromkeys(matches, (reason,))) from error


@dataclasses.dataclass
class Choice:
    """Which matches of overrides enter a Dynamo graph."""

    late: bool = False  # whether those enter that stand behind other lowerings; else those that are asked first
    chosen: Collection[tuple[str, str]] | None = None  # by override and node, those of them that enter; None: all
    # The late ones that entered, or were refused.
    matches: list[LateMatch] = dataclasses.field(default_factory=list[LateMatch])
    waiting: bool = False  # whether there are late ones, which are not asked for

    def takes(self, item: Override, nodes: Sequence[Node], context: LoweringContext) -> bool:
        """Whether an override is to be put in the place of nodes, by the first of which the match is known."""
        late = _stands_behind(nodes, context)
        if late is None:
            return False
        self.waiting |= late
        if late != self.late:
            return False
        return not late or self.chosen is None or (item.name, nodes[0].name) in self.chosen

    def met(self, item: Override, nodes: Sequence[Node], declined: NodePlacement | None = None) -> None:
        """Note a match that entered, or was refused."""
        names = frozenset(node.name for node in nodes)
        self.matches.append(LateMatch(override=item.name, node=nodes[0].name, nodes=names, declined=declined))


def _stands_behind(nodes: Sequence[Node], context: LoweringContext) -> bool | None:
    """Whether something is asked before the overrides about one of the nodes; None if no override is wanted."""
    behind = False
    for node in nodes:
        rule = last_match(context.policy.rules, node, context.graph_id, "") if context.policy.rules else None
        names = names_in_order((rule or context.policy).lowerings, context.device.lowerings)
        if "override" in names:
            behind |= names[0] != "override"
        elif rule is None:
            return None
    return behind
