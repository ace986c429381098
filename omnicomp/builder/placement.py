"""Placement: every node of a post-autograd graph gets the first lowering of the policy that takes it.

Cuts keep the graph's order. A dependency-driven partitioner would make fewer subgraphs of some graphs, but could move
a mutation, a random draw or a collective past another one; runs of neighbours in program order can't
(docs/adr/0004).
"""

import dataclasses
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch.fx import GraphModule, Node

from omnicomp.analysis.nodes import module_path, op_name, source_line
from omnicomp.errors import LoweringError
from omnicomp.lowerings import LOWERINGS, MAIN, in_order
from omnicomp.lowerings.base import Lowering, LoweringContext
from omnicomp.lowerings.override import override_of
from omnicomp.lowerings.overrides.registry import registered
from omnicomp.lowerings.overrides.rewrite import REFUSED
from omnicomp.options.placement_rules import Rule, last_match, named_subgraphs
from omnicomp.timeline import NodePlacement, Reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Neighbouring nodes on one lowering."""

    lowering: str
    nodes: tuple[Node, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The placement of a part."""

    runs: tuple[Run, ...]  # the nodes in program order, cut where the lowering changes
    # The number of operators by lowering. Inside an Inductor run an override counts as `override`, and what it calls as
    # eager's kernel by the option `numerics` as `eager`.
    counts: dict[str, int]
    declined: tuple[NodePlacement, ...]  # nodes that an earlier lowering refused for a reason of its own

    @property
    def whole(self) -> bool:
        """Whether the part is one Inductor graph."""
        return len(self.runs) == 1 and self.runs[0].lowering == MAIN.name


def place(
    module: GraphModule,
    lowerings: Sequence[Lowering],
    context: LoweringContext,
    cut: Mapping[str, Reason],
    boundaries: frozenset[str] = frozenset(),
    refused: Mapping[str, Mapping[str, Reason]] = MappingProxyType({}),
) -> Plan:
    """Ask the lowerings, in order, for every operator of the graph.

    Args:
        module: a post-autograd graph.
        lowerings: in the order of the policy, the last of which takes (nearly) everything.
        context: where the graph comes from.
        cut: nodes that failed to build on Inductor, by name, with the reason.
        boundaries: names of nodes before which a run is cut, because only the parts can be built.
        refused: nodes that another lowering failed to build, or refuses as part of this subgraph: by the names of the
            lowering and the node, with the reason.

    Raises:
        LoweringError: no lowering takes a node; the message has the reason of each.
    """
    rules, graph, part = context.policy.rules, context.graph_id, context.part
    subgraphs = named_subgraphs(rules, graph, part)
    forced: dict[Node, Rule] = {}
    if subgraphs:
        # They are numbered as they would be without these rules.
        others = tuple(rule for rule in rules if rule not in subgraphs.values())
        usual = dataclasses.replace(context, policy=dataclasses.replace(context.policy, rules=others))
        runs = place(module, lowerings, usual, cut, boundaries, refused).runs
        forced = {node: subgraphs[index] for index, run in enumerate(runs) if index in subgraphs for node in run.nodes}
    placed: dict[Node, str] = {}
    counted: dict[Node, str] = {}
    declined: list[NodePlacement] = []
    for node in module.graph.nodes:
        if not node.op.startswith("call_"):
            continue
        producer = node.args[0] if node.target is operator.getitem and node.args else None
        if isinstance(producer, Node) and producer in placed:
            placed[node], counted[node] = placed[producer], counted[producer]
            continue
        rule = forced.get(node) or _rule(node, context)
        placed[node], chain = _choose(
            node, lowerings, context, {**refused, MAIN.name: {**refused.get(MAIN.name, {}), **cut}}, rule
        )
        counted[node] = "override" if override_of(node) is not None else placed[node]
        if context.policy.numerics == "eager" and counted[node] == MAIN.name:
            from omnicomp.lowerings.exact import called_by_code

            called = called_by_code(node, MAIN.name)
            if called is not None:
                counted[node], chain = "eager", (*chain, called)
        if chain:
            declined.append(
                NodePlacement(
                    node=node.name,
                    op=_program_name(node),
                    lowering=counted[node],
                    source=source_line(node),
                    module=module_path(node),
                    chain=chain,
                )
            )
    counts = Counter(counted.values())
    return Plan(runs=_runs(placed, boundaries), counts=dict(sorted(counts.items())), declined=tuple(declined))


def left_for_overrides(
    module: GraphModule,
    lowerings: Sequence[Lowering],
    context: LoweringContext,
    failed: Mapping[str, Mapping[str, Reason]],
) -> dict[Node, tuple[Reason, ...]]:
    """The nodes that every lowering before the overrides refuses, with the reasons; not those that call one.

    Args:
        module: a post-autograd graph.
        lowerings: in the order of the policy.
        context: where the graph comes from.
        failed: nodes that a lowering failed to build or refuses, by the names of the lowering and the node.
    """
    found: dict[Node, tuple[Reason, ...]] = {}
    for node in module.graph.nodes:
        if not node.op.startswith("call_") or node.target is operator.getitem or override_of(node) is not None:
            continue
        rule = _rule(node, context)
        asked = lowerings if rule is None else in_order(rule.lowerings, context.device.lowerings)
        chain: list[Reason] = []
        for lowering in asked:
            if lowering.name == "override":
                found[node] = tuple(chain)
                break
            reason = failed.get(lowering.name, {}).get(node.name) or lowering.supports(node, context)
            if reason is None:
                break
            chain.append(reason)
    return found


def _rule(node: Node, context: LoweringContext) -> Rule | None:
    """The rule for a node. An override in the place of an operator and the operator itself go by each other's name."""
    rules = context.policy.rules
    if not rules:
        return None
    names = [str(item.op) for item in registered() if item.op is not None and node.target in item.operators]
    names += [str(item.operators[0]) for item in registered() if item.op is not None and item.op is node.target]
    return last_match(rules, node, context.graph_id, context.part, names)


def _choose(
    node: Node,
    lowerings: Sequence[Lowering],
    context: LoweringContext,
    failed: Mapping[str, Mapping[str, Reason]],
    rule: Rule | None = None,
) -> tuple[str, tuple[Reason, ...]]:
    """The first lowering that takes the node, and the reasons of those asked before it."""
    chain: list[Reason] = []
    if rule is not None:
        ruled = in_order(rule.lowerings, context.device.lowerings)
        others = [each for each in lowerings if each not in ruled and each.supports(node, context) is None]
        chain.extend(_ruled_out(rule, lowering, node) for lowering in others)
        lowerings = ruled
    names = [lowering.name for lowering in lowerings]
    item = override_of(node)
    if item is not None and "override" in names:
        # What is before it refused the nodes whose place it takes.
        inside = MAIN.name in names[names.index("override") :] and node.name not in failed[MAIN.name]
        given_up = context.graph.given_up.get(item.name, ()) if item.form in ("tag", "search") else ()
        chain += [*node.meta.get(REFUSED, ()), *given_up, *filter(None, [failed[MAIN.name].get(node.name)])]
        return MAIN.name if inside else "override", tuple(dict.fromkeys(chain))  # opaque to Inductor, inside its graph
    for lowering in lowerings:
        reason = failed.get(lowering.name, {}).get(node.name) or lowering.supports(node, context)
        if reason is not None:
            # "Nobody registered an override" is true of nearly every node; it is said once a part, not once a node.
            if reason.code != "no_override":
                chain.append(reason)
            continue
        return lowering.name, tuple(chain)
    reasons = "; ".join(str(reason) for reason in chain) or "no lowering is left"
    raise LoweringError(f"no lowering of {names} takes {node.name} ({op_name(node)}) at {source_line(node)}: {reasons}")


def _program_name(node: Node) -> str:
    """The operator of the program that a node calls, or has the place of."""
    item = override_of(node)
    return str(item.op) if item is not None and item.form == "operator" else op_name(node)


def _ruled_out(rule: Rule, lowering: Lowering, node: Node) -> Reason:
    return Reason(
        code="lowering_excluded",
        by=lowering.name,
        sentence=f"a rule places {rule.selector} on {', '.join(rule.lowerings)}",
        node=f"{node.name} ({op_name(node)})",
        lever="take it out of options={'lowerings': {...}} or of OMNICOMP_PLACE",
    )


def _runs(placed: Mapping[Node, str], boundaries: frozenset[str]) -> tuple[Run, ...]:
    runs: list[tuple[str, list[Node]]] = []
    for node, lowering in placed.items():
        starts = node.name in boundaries and lowering not in ("override", "eager")
        if not runs or runs[-1][0] != lowering or starts:
            runs.append((lowering, []))
        runs[-1][1].append(node)
    return tuple(Run(lowering=lowering, nodes=tuple(nodes)) for lowering, nodes in runs)


def taken_together(
    lowering: Lowering, nodes: Sequence[Node], context: LoweringContext
) -> tuple[frozenset[str], Reason | None]:
    """Whether a lowering takes a run of nodes as one subgraph.

    Returns:
        Names of nodes in front of which the run is to be cut, as no value flows across, and the reason why the run as
        a whole is not taken; None if it is.
    """
    if lowering.name in LOWERINGS:
        return frozenset(), None
    from omnicomp.lowerings.engines.program import EngineLowering

    if not isinstance(lowering, EngineLowering):
        return frozenset(), None
    if lowering.engine.clustering_for(context).strict:
        boundaries = _where_nothing_flows(nodes)
        if boundaries:
            return boundaries, None
    return frozenset(), lowering.accepts(nodes, context)


def _where_nothing_flows(nodes: Sequence[Node]) -> frozenset[str]:
    """The nodes at which the run can be cut without a value that crosses the cut."""
    position = {node: index for index, node in enumerate(nodes)}
    reach = 0
    found: set[str] = set()
    for index, node in enumerate(nodes):
        if index and reach < index:
            found.add(node.name)
        reach = max([reach, *(position[user] for user in node.users if user in position)])
    return frozenset(found)
