"""Search overrides: a function reads the Dynamo graph, before autograd, and finds where the override applies.

A pattern is looked for after autograd, where the gradient has been derived from the program already, so that an
override with a backward of its own comes too late there. A search names the place, the steps that go away, and how the
call is written; whether it may be is asked here, in the same way for every search.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from omnicomp._torch.autograd.attention import known_equal, known_shape
from omnicomp._torch.autograd.dispatch_trace import HigherOrderOperator, storage_key
from omnicomp._torch.dynamo.control_flow import CONTROL_FLOW
from omnicomp.analysis.nodes import fake_value, module_path, op_name, source_line, submodules
from omnicomp.lowerings.base import LoweringContext
from omnicomp.lowerings.overrides.declaration import Override, Refused, raised, refused
from omnicomp.lowerings.overrides.late import Choice
from omnicomp.lowerings.overrides.rewrite import declined_at, entering, excluded, found_wrong
from omnicomp.timeline import NodePlacement, Reason, Rewrite

_SHAPE_ONLY: Final = ("size", "dim", "ndimension", "numel", "sym_size", "stride")
_SHAPE_ATTRIBUTES: Final = ("shape", "ndim", "dtype", "device")
_MODES: Final = ("grad_enabled", "inference_mode", "_functorch", "vmap_", "_nesting")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """A computation that an override may take."""

    output: Node  # the node whose value the call makes
    steps: tuple[Node, ...]  # the other nodes of the computation, in any order; nothing else may read their elements
    # What the override's `check` is asked with, by name: nodes, for which it gets the fake values, and other values.
    arguments: dict[str, Any]
    write: Callable[[], Node]  # inserts the call before `output` and returns the node that has its value


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Ended:
    """A candidate that the search did not understand to its end."""

    node: Node  # where reading ended
    sentence: str  # why
    observed: str = ""  # the observed form
    needed: str = ""  # the expected form
    lever: str = ""  # what the user can change


def apply_searches(
    module: GraphModule, context: LoweringContext, choice: Choice, *, training: bool
) -> tuple[NodePlacement, ...]:
    """Put the overrides with a search into a Dynamo graph, in place.

    Returns:
        The matches at which the override was not inserted, with the reason.
    """
    items = entering(context, "search")
    declined: list[NodePlacement] = []
    changed = False
    for item in items:
        for found in _run(item, module, context, choice, declined):
            nodes = (found.output, *found.steps)
            if not choice.takes(item, nodes, context):
                continue
            try:
                _replace(item, found, module, context, training)
                choice.met(item, nodes)
                changed = True
            except Refused as refusal:
                declined.append(declined_at(found.output, refusal.reason, context))
                choice.met(item, nodes, declined[-1])
        declined += _in_regions(item, module, context, choice)
    if changed:
        module.graph.lint()
        module.recompile()
    return tuple(declined)


def _run(
    item: Override, module: GraphModule, context: LoweringContext, choice: Choice, declined: list[NodePlacement]
) -> Iterator[Found]:
    """The matches of one search; candidates that it did not understand go to `declined`."""
    assert item.search is not None
    try:
        results = list(item.search(module))
    except CONTROL_FLOW:
        raise
    except Exception as error:
        if context.policy.on_error == "raise":
            raise
        reason = raised(item, f"the search of the override {item.name} raised", error)
        declined.append(declined_at(next(iter(module.graph.nodes)), reason, context))
        return
    for result in results:
        if isinstance(result, Found):
            yield result
        elif choice.takes(item, [result.node], context):
            reason = refused(item, result.sentence, observed=result.observed, needed=result.needed, lever=result.lever)
            declined.append(declined_at(result.node, reason, context))
            choice.met(item, [result.node], declined[-1])


def _in_regions(item: Override, module: GraphModule, context: LoweringContext, choice: Choice) -> list[NodePlacement]:
    """Places inside the graphs that higher-order operators call, where a checkpoint would run the call twice."""
    assert item.search is not None
    declined: list[NodePlacement] = []
    for region in submodules(module):
        for found in item.search(region):
            if isinstance(found, Found) and choice.takes(item, nodes := (found.output, *found.steps), context):
                sentence = "it is in a region of a higher-order operator, such as a checkpoint"
                reason = refused(item, sentence, lever="compute it outside of the region")
                declined.append(declined_at(found.output, reason, context))
                choice.met(item, nodes, declined[-1])
        declined += _in_regions(item, region, context, choice)
    return declined


def _replace(item: Override, found: Found, module: GraphModule, context: LoweringContext, training: bool) -> None:
    """Replace a match by the call.

    Raises:
        Refused: it stays as it is.
    """
    reason = found_wrong(item, context) or excluded(item, (found.output, *found.steps), context)
    if reason is None and training and not item.trains and fake_value(found.output).requires_grad:
        reason = item.not_differentiable()
    reason = reason or _read_elsewhere(item, found) or _disturbed(item, found, module) or _unfit(item, found)
    if reason is not None:
        raise Refused(reason)
    before = set(module.graph.nodes)
    try:
        new = found.write()
        problem = _unlike(fake_value(new), fake_value(found.output))
    except CONTROL_FLOW:
        raise
    except Exception as error:
        _erase(module, before)
        raise Refused(raised(item, f"the call of the override {item.name} can't be written", error)) from error
    if problem:
        _erase(module, before)
        raise Refused(refused(item, f"the override {item.name} returns something else", observed=problem))
    context.timeline.append(
        Rewrite(
            graph=context.graph_id,
            name=item.name,
            kind="search",
            node=new.name,
            source=source_line(found.output),
            module=module_path(found.output),
            target=str(item.operators[0]),
            detail=f"{len(found.steps) + 1} nodes",
        )
    )
    found.output.replace_all_uses_with(new)
    gone = {found.output, *found.steps}
    for node in [node for node in reversed(module.graph.nodes) if node in gone]:
        if not node.users:  # a step stays where its shape is asked for; the compiler then drops what computes it
            module.graph.erase_node(node)


def _erase(module: GraphModule, kept: set[Node]) -> None:
    for node in [node for node in reversed(module.graph.nodes) if node not in kept]:
        module.graph.erase_node(node)


def _read_elsewhere(item: Override, found: Found) -> Reason | None:
    own = {found.output, *found.steps}
    for step in found.steps:
        other = next((user for user in step.users if user not in own and not _asks_for_shape(user)), None)
        if other is not None:
            returned = other.op == "output"
            use = "returned" if returned else f"also read by {other.name} ({op_name(other)})"
            return refused(
                item,
                f"{step.name} is {use}, and the override does not make it",
                observed=f"{list(fake_value(step).shape)}",
                needed="no other use of it",
                lever=f"do not {'return it from' if returned else 'read it a second time in'} the compiled function",
            )
    return None


def _asks_for_shape(node: Node) -> bool:
    name = op_name(node).rpartition(".")[2]
    return name in _SHAPE_ONLY or (name == "getattr" and node.args[1] in _SHAPE_ATTRIBUTES)


def _disturbed(item: Override, found: Found, module: GraphModule) -> Reason | None:
    """What was done between the first of the steps and the output that the call, which stands at the end, would see."""
    own = {found.output, *found.steps}
    early = {n for step in found.steps for n in step.all_input_nodes if n not in own}
    memory = {storage_key(t) for n in early for t in tree_leaves(fake_value(n)) if isinstance(t, torch.Tensor)}
    begun = False
    for node in module.graph.nodes:
        begun = begun or node in own
        if node is found.output:
            return None
        name = op_name(node)
        if "_nesting" in name or (begun and any(word in name for word in _MODES)):
            return refused(
                item,
                f"it would be moved past a change of mode ({name}), or into a transform of torch.func",
                observed=name,
                needed="one mode of autograd from the first step to the last",
                lever="compute all of it in one mode, outside of torch.func's transforms",
            )
        if begun and node not in own and _may_write(node, memory):
            return refused(
                item,
                f"what it reads is changed in place by {node.name} before it is done",
                observed=name,
                needed="inputs that stay as they are",
                lever="change them afterwards, or change a copy",
            )
    return None


def _may_write(node: Node, memory: set[int]) -> bool:
    """Whether a node may change memory that the computation has read."""
    name = op_name(node).rpartition(".")[2]
    named = (
        (name.endswith("_") and not name.endswith("__")) or name in ("setitem", "__setitem__") or "out" in node.kwargs
    )
    in_place = name.startswith("i") and name[1:] in ("add", "sub", "mul", "truediv", "floordiv", "and", "or", "xor")
    operator = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    if not (named or in_place or operator or isinstance(node.target, HigherOrderOperator)):
        return False
    values = [leaf for n in node.all_input_nodes for leaf in tree_leaves(fake_value(n))]
    return any(isinstance(value, torch.Tensor) and storage_key(value) in memory for value in values)


def _unfit(item: Override, found: Found) -> Reason | None:
    fakes = {name: fake_value(value) for name, value in found.arguments.items()}
    reason = item.unfit(tuple(fakes.values()))
    if reason is not None or item.check is None:
        return reason
    wanted = inspect.signature(item.check).parameters
    return item.checked(**{name: value for name, value in fakes.items() if name in wanted})


def _unlike(new: Any, old: torch.Tensor) -> str:
    """How a call's value differs from what it replaces, as far as a program could see; empty if it does not."""
    if not isinstance(new, torch.Tensor):
        return type(new).__name__
    if not known_shape(new, old):
        return f"{list(new.shape)} for {list(old.shape)}"
    if (new.dtype, new.device, new.requires_grad) != (old.dtype, old.device, old.requires_grad):
        return f"{new.dtype}, {new.device}, requires_grad={new.requires_grad}"
    same = (
        known_equal(size, 1) or known_equal(left, right)
        for size, left, right in zip(new.shape, new.stride(), old.stride(), strict=True)
    )
    return "" if all(same) else f"strides {list(new.stride())} for {list(old.stride())}"
