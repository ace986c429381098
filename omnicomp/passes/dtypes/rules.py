"""Which dtype the policy gives an operator, and by which rule: a node's own, then keep, ops, modules, and compute."""

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from omnicomp import records
from omnicomp.analysis.nodes import fake_value, module_path, op_name
from omnicomp.options.dtype_policy import DtypePolicy
from omnicomp.options.placement_rules import is_within
from omnicomp.passes.dtypes.operators import is_optimizer, kind, operator_class, tensors


@records.dataclass(frozen=True, kw_only=True)
class Decision:
    """The dtype that an operator is to compute in."""

    dtype: torch.dtype  # of its floating-point operands
    rule: str  # the field of the policy that says so, with the selector if it has one
    forced: bool = False  # whether a rule names the operator or its module, rather than its class by default
    by_node: bool = False  # whether it names this very node


def decide(node: Node, policy: DtypePolicy) -> Decision | None:
    """What the policy wants of an operator; None if it is to stay as the user wrote it.

    A result that a rule gives is not None also where the operator computes in that dtype already.
    """
    classes = operator_class(node)
    if not classes or "move" in classes:
        return None
    if policy.keep or policy.ops or policy.modules:
        ruled, decision = _by_rules(node, policy, (*names(node), *classes))
        if ruled:
            return decision
    operands = [v for operand in node.all_input_nodes for v in tensors(operand) if v.is_floating_point()]
    if any(value.dtype is not torch.float32 for value in operands):
        return None  # half precision that is there already is what the user wrote
    if "matrix" in classes and policy.compute is not None:
        return Decision(dtype=policy.compute, rule="compute")
    if "wide" in classes and policy.accumulate is not torch.float32 and not is_optimizer(node):
        return Decision(dtype=policy.accumulate, rule="accumulate")
    return None


def _by_rules(node: Node, policy: DtypePolicy, operator: tuple[str, ...]) -> tuple[bool, Decision | None]:
    """Whether some selector matches, and what it says."""

    def is_operator(selector: str) -> bool:
        return any(fnmatchcase(name, selector) for name in operator)

    own = [selector for selector in policy.keep if selector == node.name and not is_operator(selector)]
    if own:
        return True, None
    for field in ("ops", "modules"):
        entries: dict[str, torch.dtype] = dict(getattr(policy, field))
        if node.name in entries and not is_operator(node.name):
            rule = f"{field} {node.name!r}"
            return True, Decision(dtype=entries[node.name], rule=rule, forced=True, by_node=True)
    path = module_path(node)
    if any(is_operator(selector) or is_within(path, selector) for selector in policy.keep):
        return True, None
    for selector in reversed(list(policy.ops)):
        if is_operator(selector):
            return True, Decision(dtype=policy.ops[selector], rule=f"ops {selector!r}", forced=True)
    for selector in reversed(list(policy.modules)):
        if selector == "*" or is_within(path, selector):
            return True, Decision(dtype=policy.modules[selector], rule=f"modules {selector!r}", forced=True)
    return False, None


def names(node: Node) -> tuple[str, ...]:
    """What an operator may be called in a selector: torch's function, its bare name, and ATen's operator of that name.

    For example `torch.nn.functional.linear`, `linear`, `aten.linear`.
    """
    full, bare = op_name(node), kind(node)
    overload = full.rpartition(".")[0] if full.startswith("aten.") else ""
    return tuple(filter(None, (full, bare, f"aten.{bare}", overload)))


def floating_dtypes(node: Node) -> set[torch.dtype]:
    """The dtypes of an operator's floating-point operands and results."""
    values: list[Any] = [*tree_leaves([fake_value(operand) for operand in node.all_input_nodes]), *tensors(node)]
    return {v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()}
