"""Overrides of whole blocks: before autograd, one call takes the place of everything that a module computes."""

import dataclasses
from operator import getitem
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.dynamo.control_flow import CONTROL_FLOW
from omnicomp._torch.symbols import expression
from omnicomp.analysis.nodes import fake_value, op_name, source_line, submodules
from omnicomp.lowerings.base import LoweringContext
from omnicomp.lowerings.overrides.admission import admit, call_arguments
from omnicomp.lowerings.overrides.blocks import Block, find_blocks
from omnicomp.lowerings.overrides.declaration import Function, Override, Refused, raised, refused
from omnicomp.lowerings.overrides.late import Choice
from omnicomp.lowerings.overrides.rewrite import declined_at, entering
from omnicomp.safety.forks import new_lock
from omnicomp.safety.privacy import logger
from omnicomp.timeline import NodePlacement, Reason, Rewrite

log = logger("omnicomp.overrides")

_KEPT: Final = 1024
_matched: Final[dict[tuple[str, str], "Matched"]] = {}
_lock: Final = new_lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matched:
    """A block that an override took the place of."""

    function: Function  # what it computed, as a function of the arguments of the override's operator
    path: str  # of the module
    text: str  # its operators and constants; equal for blocks that compute the same
    differentiable: tuple[str, ...]  # the arguments whose gradients the program may ask for


def apply_blocks(
    module: GraphModule, context: LoweringContext, choice: Choice, *, training: bool
) -> tuple[NodePlacement, ...]:
    """Put the overrides of blocks into a Dynamo graph, in place.

    Returns:
        The blocks that an override matched but was not put into, with its reason.
    """
    items = entering(context, "tag")
    taken: dict[Node, Override] = {}
    refusals: list[NodePlacement] = []
    for item in items:
        gone: set[Node] = set()
        # Outer blocks come first: one inside a block that was taken is gone, and is not asked about.
        for block in _matching(item, module):
            if block.nodes[0] in gone or not choice.takes(item, block.nodes, context):
                continue
            try:
                call = _replace(item, block, module, context, taken, training)
            except Refused as refusal:
                refusals.append(_declined(block, refusal.reason, context))
                choice.met(item, block.nodes, refusals[-1])
                continue
            except CONTROL_FLOW:
                raise
            except Exception as error:
                # Nothing was changed yet: the graph is edited when all questions are answered.
                if context.policy.on_error == "raise":
                    raise
                reason = raised(item, f"{block.path} can't be judged", error)
                refusals.append(_declined(block, reason, context))
                choice.met(item, block.nodes, refusals[-1])
                continue
            if call is not None:
                choice.met(item, block.nodes)
                taken[call] = item
                gone.update(block.nodes)
        refusals += _in_regions(item, module, context, choice)
    if taken:
        module.graph.lint()
        module.recompile()
    return tuple(refusals)


def matched_block(item: Override, node: Node) -> Matched | None:
    """What a call of an override replaced; None if it is not known any more."""
    stack = node.meta.get("nn_module_stack") or {}
    with _lock:
        return _matched.get((item.name, next(reversed(stack), "")))


def matched_at(item: Override, path: str) -> Matched | None:
    """The block of a module's path that an override replaced last, or None."""
    with _lock:
        found = [block for (name, _), block in _matched.items() if name == item.name and block.path == path]
    return found[-1] if found else None


def _matching(item: Override, module: GraphModule) -> list[Block]:
    assert item.module is not None
    return [block for block in find_blocks(module) if block.matches(item.module)]


def _declined(block: Block, reason: Reason, context: LoweringContext) -> NodePlacement:
    return declined_at(block.nodes[0], reason, context, module=block.path, op=block.cls.__name__)


def _in_regions(item: Override, module: GraphModule, context: LoweringContext, choice: Choice) -> list[NodePlacement]:
    """Blocks inside the graphs that higher-order operators call: parameters cannot be recognised there."""
    found: list[NodePlacement] = []
    for region in submodules(module):
        for block in _matching(item, region):
            if not choice.takes(item, block.nodes, context):
                continue
            sentence = f"the block {block.path} is in a region of a higher-order operator, such as a checkpoint"
            reason = refused(item, sentence, lever="call the module outside of the region")
            found.append(_declined(block, reason, context))
            choice.met(item, block.nodes, found[-1])
        found += _in_regions(item, region, context, choice)
    return found


def _replace(
    item: Override,
    block: Block,
    module: GraphModule,
    context: LoweringContext,
    taken: dict[Node, Override],
    training: bool,
) -> Node | None:
    """Put the override's call in the place of a block.

    Returns:
        The call; None if another override has the block or a part of it.

    Raises:
        Refused: the block is left as it is.
    """
    winner = next((taken[node] for node in block.nodes if node in taken), None)
    if winner is not None:
        order = "of equal priority, registered later" if winner.priority == item.priority else "of lower priority"
        log.info("%s goes to the override %s; %s, %s, is left out", block.path, winner.name, item.name, order)
        return None
    arguments, value = admit(item, block, context, training=training)
    _keep(item, block, module, arguments)
    return _insert(item, block, context, arguments, value)


def _keep(item: Override, block: Block, module: GraphModule, arguments: dict[str, Node]) -> None:
    """Keep the block as a function, for `matched_block`."""
    sources = [_source_of(node, arguments) for node in block.inputs]
    if None in sources:
        return
    graph = block.extract(module)
    names = [argument.name for argument in item.operators[0]._schema.arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        given = [values[s[0]] if s[1] is None else values[s[0]].shape[s[1]] for s in sources if s is not None]
        results = graph(*given)
        return results[0] if len(results) == 1 else results

    made = Matched(
        function=call,
        path=block.path,
        text=_text(graph),
        differentiable=tuple(n for n, a in arguments.items() if getattr(fake_value(a), "requires_grad", False)),
    )
    with _lock:
        _matched.pop((item.name, block.key), None)
        _matched[item.name, block.key] = made
        while len(_matched) > _KEPT:
            del _matched[next(iter(_matched))]


def _text(graph: GraphModule) -> str:
    """The operators of a block with their constants, whatever its nodes are called."""
    numbers = {node: f"%{index}" for index, node in enumerate(graph.graph.nodes)}
    lines = [
        f"{op_name(node)} {torch.fx.map_arg((node.args, node.kwargs), numbers.__getitem__)}"
        for node in graph.graph.nodes
    ]
    return "\n".join(lines)


def _source_of(node: Node, arguments: dict[str, Node]) -> tuple[str, int | None] | None:
    """The argument that has the value of an input, or the argument and dimension whose size it is."""
    for name, argument in arguments.items():
        if node is argument:
            return name, None
    wanted = expression(fake_value(node))
    for name, argument in arguments.items():
        for dimension, size in enumerate(getattr(fake_value(argument), "shape", ())):
            if not isinstance(wanted, int) and expression(size) == wanted:
                return name, dimension
    return None


def _dependents(block: Block) -> list[Node]:
    """The nodes between the block's own that need its values, in program order."""
    late: dict[Node, None] = {}
    for node in block.between:
        if any(source in block.members or source in late for source in node.all_input_nodes):
            late[node] = None
    return list(late)


def _stack_to(block: Block) -> dict[str, Any]:
    """The modules that are being called where the block is, itself the last."""
    stack: dict[str, Any] = {}
    for key, entry in block.nodes[0].meta["nn_module_stack"].items():
        stack[key] = entry
        if key == block.key:
            break
    return stack


def _insert(item: Override, block: Block, context: LoweringContext, arguments: dict[str, Node], value: Any) -> Node:
    """Exchange the block for a call behind its last node; what stands between and needs the block goes behind that."""
    graph, last = block.nodes[0].graph, block.nodes[-1]
    args, kwargs = call_arguments(item, arguments)
    meta = {k: v for k, v in block.nodes[0].meta.items() if k == "stack_trace"}
    meta["nn_module_stack"] = _stack_to(block)
    late = _dependents(block)
    with graph.inserting_after(last):
        call = graph.call_function(item.operators[0], args, kwargs)
    call.meta.update(meta, example_value=value)
    new, cursor = [call], call
    if isinstance(value, (tuple, list)):
        new = []
        for index, result in enumerate(value):  # type: ignore[arg-type]
            with graph.inserting_after(cursor):
                cursor = graph.call_function(getitem, (call, index))
            cursor.meta.update(meta, example_value=result)
            new.append(cursor)
    for node in late:
        cursor.append(node)
        cursor = node
    for old, replacement in zip(block.outputs, new, strict=True):
        old.replace_all_uses_with(replacement, delete_user_cb=lambda user: user not in block.members)
    for node in reversed(block.nodes):
        graph.erase_node(node)
    context.timeline.append(
        Rewrite(
            graph=context.graph_id,
            name=item.name,
            kind="block",
            node=call.name,
            source=source_line(call),
            module=block.path,
            target=str(item.operators[0]),
            detail=f"{len(block.nodes)} nodes of {block.cls.__name__}",
        )
    )
    return call
