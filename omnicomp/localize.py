"""Finding the nodes that make Inductor fail, so that only they leave it.

Inductor's exception often names the node (its graph interpreter was at it); otherwise the run is halved, with a
bounded number of builds, until the failing nodes, or the place between two that only fail together, are found.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence

from torch.fx import Node

from omnicomp._torch import inductor
from omnicomp.graphs import op_name, source_line
from omnicomp.timeline import Reason

__all__ = ["Budget", "Verdict", "find_failing"]

Build = Callable[[Sequence[Node]], Exception | None]
"""Tries to build a run of nodes; returns the exception, or None if it worked."""


@dataclasses.dataclass
class Budget:
    """How many builds may still be spent."""

    builds: int

    def spend(self) -> bool:
        """Take one; False if none is left."""
        self.builds -= 1
        return self.builds >= 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What has to change for a run of nodes to build.

    Attributes:
        cut: nodes that must leave Inductor, by name, with the reason.
        boundaries: nodes before which the run must be cut.
    """

    cut: dict[str, Reason]
    boundaries: frozenset[str] = frozenset()


def find_failing(nodes: Sequence[Node], error: Exception, build: Build, budget: Budget) -> Verdict:
    """Find what makes a run fail.

    Args:
        nodes: the run that failed.
        error: what it failed with.
        build: tries a part of the run.
        budget: bounds the builds; when it is spent, what is left of the run is cut as a whole.
    """
    if inductor.is_missing_tool(error):
        note = "no node is to blame, so all of them leave"
        lever = "install a C++ compiler (g++ or clang) or name one in CXX; `omnicomp doctor` shows what is found"
        return Verdict(cut={node.name: _reason(node, error, note, lever) for node in nodes})
    named = _named_node(nodes, error)
    if named is not None:
        return Verdict(cut={named.name: _reason(named, error)})
    if len(nodes) == 1:
        return Verdict(cut={nodes[0].name: _reason(nodes[0], error)})
    middle = _middle(nodes)
    if middle == 0:
        return Verdict(cut={node.name: _reason(node, error) for node in nodes})
    cut: dict[str, Reason] = {}
    boundaries: frozenset[str] = frozenset()
    for half in (nodes[:middle], nodes[middle:]):
        if not budget.spend():
            note = "the number of builds allowed by max_builds is spent, so it was not narrowed down further"
            cut.update({node.name: _reason(node, error, note) for node in nodes})
            return Verdict(cut=cut)
        failure = build(half)
        if failure is not None:
            verdict = find_failing(half, failure, build, budget)
            cut.update(verdict.cut)
            boundaries |= verdict.boundaries
    if not cut and not boundaries:
        boundaries = frozenset({nodes[middle].name})  # each half builds, only both together do not
    return Verdict(cut=cut, boundaries=boundaries)


def _middle(nodes: Sequence[Node]) -> int:
    """Where to halve a run: never between an operator and the `getitem`s of its result, 0 if there is nowhere else."""
    starts = [i for i, node in enumerate(nodes) if i > 0 and node.target is not operator.getitem]
    return min(starts, key=lambda i: abs(i - len(nodes) / 2), default=0)


def _named_node(nodes: Sequence[Node], error: Exception) -> Node | None:
    """The node of the run at which Inductor stood; Inductor's own rewrites may have made it one we don't know."""
    at = inductor.failing_node(error)
    if at is None:
        return None
    return next((node for node in nodes if node.name == at.name and node.target == at.target), None)


def _reason(node: Node, error: Exception, note: str = "", lever: str = "") -> Reason:
    return Reason(
        code="cut_out",
        by="inductor",
        sentence=f"Inductor can't build it: {first_line(error)}{f' ({note})' if note else ''}",
        observed=type(getattr(error, "inner_exception", error)).__name__,
        node=f"{node.name} ({op_name(node)})",
        source=source_line(node),
        lever=lever or "register an override for the operator, or report the error to PyTorch",
    )


def first_line(error: BaseException) -> str:
    """The first line of an error that says something, with its type, at most 300 characters."""
    inner: BaseException = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    name = type(inner).__name__
    return (text if text.startswith(name) else f"{name}: {text}")[:300]
