"""What a budget says of a report, as frozen dataclasses; `omnicomp.audit.gate.judge` finds it."""

import dataclasses
from typing import Any, Final

from omnicomp.audit.model import Audit
from omnicomp.options.fallback_limits import FallbackBudget
from omnicomp.timeline import Reason

__all__ = ["STATES", "Fallen", "Verdict"]

STATES: Final[dict[str, str]] = {
    "counts": "counts against the budget",
    "allowed": "the budget allows it",
    "acknowledged": "the project acknowledges it",
    "known": "the baseline has it, too",
    "chosen": "no compiler was asked, or eager was measured to be faster",
}
"""What a fallback can be; only the first one counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fallen:
    """An operator, a subgraph or a graph that is on eager although a compiler was asked first.

    Attributes:
        state: a key of `STATES`.
        why: the selector or the acknowledgement that makes it not count, or empty.
        graph: id of the Dynamo graph.
        part: `forward`, `backward`, `inference`, or empty for a whole graph.
        node: name of the node, or empty for a subgraph.
        subgraph: id of its subgraph, or empty if that is not known.
        ops: count of each operator; of a subgraph, of those alone that are of this state.
        nodes: how many operators it is.
        source: `file:line`, or empty.
        module: module path, or empty.
        reasons: why it is on eager, one for each lowering that was asked before.
    """

    state: str
    graph: str
    part: str
    why: str = ""
    node: str = ""
    subgraph: str = ""
    ops: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    nodes: int = 1
    source: str = ""
    module: str = ""
    reasons: tuple[Reason, ...] = ()

    @property
    def name(self) -> str:
        """The operator that there is most of, or what fell back if its operators are not known."""
        most = sorted(self.ops, key=lambda op: (-self.ops[op], op))
        return most[0] if most else self.subgraph or self.graph


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a budget says of one report.

    Attributes:
        name: of the report: its file, or empty.
        audit: the report.
        budget: the bounds.
        fallen: everything that is on eager, what counts first.
        nodes: how many operators count.
        share: their part of the work, from 0 to 1; that of a subgraph counts as a whole if any operator of it does.
        basis: what the work is counted in, `flops` or `nodes`; `none` if it is not known.
        notes: what is wrong with the list of acknowledgements, and what of it is about nothing here.
        compared: whether only what a baseline does not have counts.
    """

    name: str
    audit: Audit
    budget: FallbackBudget
    fallen: tuple[Fallen, ...] = ()
    nodes: int = 0
    share: float = 0.0
    basis: str = "none"
    notes: tuple[str, ...] = ()
    compared: bool = False

    @property
    def counted(self) -> tuple[Fallen, ...]:
        """What counts against the budget."""
        return tuple(item for item in self.fallen if item.state == "counts")

    @property
    def over_nodes(self) -> bool:
        """Whether more operators count than may."""
        return self.budget.max_nodes is not None and self.nodes > self.budget.max_nodes

    @property
    def over_share(self) -> bool:
        """Whether they have more of the work than they may."""
        return self.budget.max_flops_share is not None and self.share > self.budget.max_flops_share

    @property
    def over(self) -> bool:
        """Whether it is over the budget."""
        return self.over_nodes or self.over_share

    def summary(self) -> str:
        """One line."""
        from omnicomp.audit.gate.views import summary

        return summary(self)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form that `docs/audit.md` describes, as plain dictionaries and lists."""
        from omnicomp.audit.gate.views import to_dict

        return to_dict(self)
