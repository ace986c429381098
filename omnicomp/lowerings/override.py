"""The override lowering: nodes that call a registered override's custom operator.

Inside an Inductor subgraph such a node is opaque to Inductor, which calls the operator. Only where a part is cut can
the operator stand alone; then this lowering runs it.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule, Node

from omnicomp._torch.autograd.overrides import HigherOrderOperator, OpOverload
from omnicomp._torch.fx import boxed
from omnicomp.analysis.nodes import op_name
from omnicomp.lowerings.base import Executable, LoweringContext, Support
from omnicomp.lowerings.overrides.registry import Override, registered
from omnicomp.timeline import Reason

if TYPE_CHECKING:
    from omnicomp.lowerings.overrides.tag import Matched


def override_of(node: Node) -> Override | None:
    """The override whose operator the node calls, or None."""
    if node.op != "call_function":
        return None
    return next((item for item in registered() if node.target in item.operators), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedCall:
    """A call of an override in a graph, and its reference."""

    item: Override  # the override
    operator: Any  # the called operator
    truth: Callable[..., Any] | None  # what it should compute, with the same arguments; None if that is not known
    text: str = ""  # what tells this use of the override from others: the operators and constants of a block
    # Arguments whose gradients are the override's own, so that they have to be right as well; `*` for those that it has
    # gradients for.
    differentiable: tuple[str, ...] = ()
    subgraph: str = ""  # id of the subgraph, or of the call inside one


def planned_call(node: Node, subgraph: str) -> PlannedCall | None:
    """The planned call of a node that calls an override, also if it was functionalised; None for other nodes."""
    target = node.target
    if isinstance(target, HigherOrderOperator) and node.args and isinstance(node.args[0], OpOverload):
        target = node.args[0]  # auto_functionalized
    item = next((i for i in registered() if target in i.operators), None) if node.op == "call_function" else None
    if item is None:
        return None
    block = None
    if item.form == "tag":
        from omnicomp.lowerings.overrides.tag import matched_block

        block = matched_block(item, node)
    return planned(item, target, block, subgraph)


def planned(item: Override, operator: Any, block: "Matched | None", subgraph: str) -> PlannedCall:
    """A call of one of an override's operators, with the block that it replaced, if that is known."""
    truth: Callable[..., Any] | None = None
    gradients = block.differentiable if block is not None else ()
    if operator is item.operators[0] and item.form == "tag":
        truth = block.function if block is not None else item.reference
    elif item.form == "operator":
        truth = item.reference or item.op
    elif item.form == "search" and operator is item.operators[0]:
        truth, gradients = item.reference, ("*",)
    elif item.form == "pattern" and len(item.operators) == 1 and item.reference is not None:
        names = [argument.name for argument in operator._schema.arguments]
        truth = item.reference if names == list(inspect.signature(item.reference).parameters) else None
    return PlannedCall(
        item=item,
        operator=operator,
        truth=truth,
        text=block.text if block is not None else "",
        differentiable=gradients if item.trains else (),
        subgraph=subgraph,
    )


def has_own_gradients(module: GraphModule) -> bool:
    """Whether a graph before autograd calls an override that is differentiated by a derivative of its own."""
    calls = (planned_call(node, "") for node in module.graph.nodes)
    return any(call is not None and call.truth is not None and call.differentiable for call in calls)


def put_references(module: GraphModule) -> GraphModule:
    """Replace calls of overrides in a graph by calls of their references, in place, and return the graph.

    A call whose reference is unknown stays. The result is to be run, not compiled.
    """
    changed = False
    for node in module.graph.nodes:
        call = planned_call(node, "")
        if call is not None and call.truth is not None and node.target is call.operator:
            node.target = _named(call.truth, f"reference_of_{call.item.name}")
            changed = True
    if changed:
        module.recompile()
    return module


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function with a name of its own: the generated code refers to what it calls by name."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    run.__name__ = run.__qualname__ = name
    run.__module__ = __name__
    return run


class OverrideLowering:
    """Takes the nodes that call operators of overrides."""

    name = "override"

    def supports(self, node: Node, context: LoweringContext) -> Support:
        """Yes for an override's operator."""
        if override_of(node) is not None:
            return None
        return Reason(
            code="no_override",
            by=self.name,
            sentence=f"no override is registered for {op_name(node)}",
            lever="register a kernel with @omnicomp.override",
        )

    def lower(self, module: GraphModule, inputs: Sequence[Any], context: LoweringContext) -> Executable:
        """Run the operators one by one; each is a kernel of its own."""
        items = [item for node in module.graph.nodes if (item := override_of(node)) is not None]
        functions = [f"{item.function.__module__}.{item.function.__qualname__}" for item in items]
        kernels = {str(operator): 1 for item in items for operator in item.operators}
        return Executable(lowering="override", call=boxed(module), attest=lambda: (", ".join(functions), kernels))
