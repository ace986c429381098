"""Insertion of overrides of operators and patterns into post-autograd graphs; refusals are recorded with a reason."""

import dataclasses
import functools
import operator
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.autograd.patterns import Match, Pattern, build_pattern
from omnicomp.analysis.nodes import fake_value, module_path, op_name, source_line
from omnicomp.lowerings.base import LoweringContext, names_in_order
from omnicomp.lowerings.overrides.declaration import Override
from omnicomp.lowerings.overrides.registry import enabled
from omnicomp.lowerings.overrides.trust import distrusted
from omnicomp.options.placement_rules import last_match
from omnicomp.safety.forks import new_lock
from omnicomp.safety.privacy import logger
from omnicomp.timeline import NodePlacement, Reason

log = logger("omnicomp.overrides")


REFUSED: Final = "omnicomp_refused"
"""The metadata of a call of an override with the reasons of the lowerings that were asked before."""

Left = Mapping[Node, tuple[Reason, ...]]
"""The nodes for which overrides are asked, with the reasons of the lowerings that were asked before."""


def apply_overrides(module: GraphModule, context: LoweringContext, left: Left) -> tuple[NodePlacement, ...]:
    """Insert the overrides of operators and patterns into a post-autograd graph, in place.

    Args:
        module: the graph.
        context: where it comes from.
        left: the nodes that are left for overrides. A pattern needs one of them, and takes the others with it.

    Returns:
        The nodes at which an override matched but refused, with its reason.
    """
    refused: list[NodePlacement] = []
    changed = False
    items = enabled(context.policy.disable_overrides, context.policy.overrides)
    for index, item in enumerate(items):
        if item.form == "operator":
            changed |= _replace_operator(item, module, context, left, refused, items[index + 1 :])
        elif item.form == "pattern":
            changed |= _replace_pattern(item, module, context, left, refused)
    if changed:
        module.graph.lint()
        module.recompile()
    return tuple(refused)


def _replace_operator(
    item: Override,
    module: GraphModule,
    context: LoweringContext,
    left: Left,
    refused: list[NodePlacement],
    later: Sequence[Override],
) -> bool:
    rivals = [other.name for other in later if other.op is item.op and other.priority == item.priority]
    changed = False
    for node in module.graph.find_nodes(op="call_function", target=item.op):
        if node not in left:
            continue
        reason = _untrained(item, context)
        if reason is None:
            args = torch.fx.map_arg(node.args, fake_value)
            kwargs = torch.fx.map_arg(dict(node.kwargs), fake_value)
            reason = item.refusal(*args, **kwargs)
        if reason is not None:
            refused.append(declined_at(node, reason, context))
            continue
        node.target = item.operators[0]
        node.meta[REFUSED] = left[node]
        changed = True
        for rival in rivals:
            log.info("%s goes to the override %s, registered before %s of equal priority", node, item.name, rival)
    return changed


def _untrained(item: Override, context: LoweringContext) -> Reason | None:
    if context.part != "inference" and not item.trains:
        return item.not_differentiable()
    return found_wrong(item, context)


def found_wrong(item: Override, context: LoweringContext) -> Reason | None:
    """Why an override is left out that verification found wrong on this device; None if it did not."""
    policy = context.policy
    if policy.verify == "off":
        return None
    return distrusted(item, torch.device(context.device.type), stored=policy.verdicts == "use")


def entering(context: LoweringContext, form: str) -> list[Override]:
    """The enabled overrides of a form that enters before autograd; none where no order has a place for overrides."""
    policy = context.policy
    if not any("override" in each.lowerings for each in (policy, *policy.rules)):
        return []
    return [item for item in enabled(policy.disable_overrides, policy.overrides) if item.form == form]


def excluded(item: Override, nodes: Sequence[Node], context: LoweringContext) -> Reason | None:
    """The reason of a placement rule that keeps one of the nodes off the overrides, or None."""
    for node in nodes if context.policy.rules else ():
        rule = last_match(context.policy.rules, node, context.graph_id, "")
        if rule is not None and "override" not in rule.lowerings:
            return Reason(
                code="lowering_excluded",
                by=item.name,
                sentence=f"the rule for {rule.selector} keeps {op_name(node)} off the overrides",
                observed=", ".join(rule.lowerings),
                needed="override",
                lever=f"name override in the rule for {rule.selector}",
            )
    return None


# With the override, as another one may get its name.
_patterns: Final[dict[str, tuple[Override, Pattern]]] = {}
_lock: Final = new_lock()
_active: Final = threading.local()


def _replace_pattern(
    item: Override, module: GraphModule, context: LoweringContext, left: Left, refused: list[NodePlacement]
) -> bool:
    reason = _untrained(item, context)
    if reason is not None and context.part == "backward":
        return False  # what it would replace there is told of the forward
    pattern = _pattern(item)
    if reason is not None:
        refused += [declined_at(node, reason, context) for node in pattern.places(module.graph) if node in left]
        return False
    _active.refused, _active.origins, _active.context, _active.left = refused, {}, context, left
    try:
        changed = pattern.apply(module.graph) > 0
        for node in module.graph.nodes if changed else ():
            if node.target in item.operators and REFUSED not in node.meta and node.args:
                # The matcher makes new nodes without the user's source line; give them that of what they replace.
                found = _active.origins.get(node.args[0], {})
                node.meta.update({key: value for key, value in found.items() if not node.meta.get(key)})
        return changed
    finally:
        _active.refused, _active.origins, _active.context, _active.left = None, {}, None, {}


def _pattern(item: Override) -> Pattern:
    with _lock:
        known = _patterns.get(item.name)
        if known is not None and known[0] is item:
            return known[1]
        assert item.reference is not None
        assert item.example is not None
        pattern = build_pattern(
            item.reference, item.function, item.example(), item.scalars, functools.partial(_accepts, item)
        )
        _patterns[item.name] = (item, pattern)
        return pattern


def _accepts(item: Override, match: Match, values: dict[str, Any]) -> bool:
    chains = [_active.left[node] for node in match.nodes if node in _active.left]
    if not chains:
        return False
    reason = excluded(item, match.nodes, _active.context) or item.refusal(*map(fake_value, values.values()))
    anchor = next(n for n in reversed(match.nodes) if n.op == "call_function" and n.target is not operator.getitem)
    if reason is None:
        first = next(iter(values.values()))
        _active.origins[first] = {k: anchor.meta[k] for k in _ORIGIN if k in anchor.meta}
        _active.origins[first][REFUSED] = tuple(dict.fromkeys(reason for chain in chains for reason in chain))
        return True
    if getattr(_active, "refused", None) is not None:
        _active.refused.append(declined_at(anchor, reason, _active.context))
    return False


_ORIGIN: Final = ("stack_trace", "nn_module_stack", "source_fn_stack")


def next_lowering(context: LoweringContext) -> str:
    """The lowering that is asked after the overrides."""
    names = names_in_order(context.policy.lowerings, context.device.lowerings)
    later = names[names.index("override") + 1 :] if "override" in names else names
    return later[0] if later else "eager"


def declined_at(
    node: Node, reason: Reason, context: LoweringContext, *, module: str | None = None, op: str | None = None
) -> NodePlacement:
    """Record that an override matched at a node but was refused."""
    source, name = source_line(node), op or op_name(node)
    located = dataclasses.replace(reason, node=f"{node.name} ({name})", source=source)
    return NodePlacement(
        node=node.name,
        op=name,
        lowering=next_lowering(context),
        source=source,
        module=module_path(node) if module is None else module,
        chain=(located,),
    )
