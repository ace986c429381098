"""The eager lowering: runs a subgraph operator by operator through torch's dispatcher. It is always asked last."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.autograd.flex import FLEX_BACKWARD, backward_without_kernel
from omnicomp._torch.fx import boxed
from omnicomp.analysis.layouts import Layout, layout_of, restride
from omnicomp.analysis.nodes import fake_value, op_name, source_line
from omnicomp.lowerings.base import Executable, LoweringContext, Support
from omnicomp.timeline import Reason

_SEEDED: Final = (
    "prims.inductor_seed",
    "prims.inductor_random",
    "prims.inductor_randint",
    "prims.inductor_lookup_seed",
)


class EagerLowering:
    """Runs the generated code of the FX graph, which calls each operator."""

    name = "eager"

    def supports(self, node: Node, context: LoweringContext) -> Support:
        """Everything but Inductor's own random numbers.

        Those are drawn from seeds that only Inductor's generated code honours: outside of it the backward would draw
        others than the forward.

        With `numerics="batch-invariant"`, not what computes other values for a row beside other rows.
        """
        if _invariant(context):
            from omnicomp.lowerings.batch_invariant import refusal

            refused = refusal(node, context.device.type, self.name)
            if refused is not None:
                return refused
        if not op_name(node).startswith(_SEEDED):
            return None
        return Reason(
            code="unsafe_in_eager",
            by=self.name,
            sentence="Inductor's seeded random numbers would differ between forward and backward outside its code",
            node=f"{node.name} ({op_name(node)})",
            source=source_line(node),
            lever="set options={'fallback_random': True}, so that eager's generator is used everywhere",
        )

    def lower(self, module: GraphModule, inputs: Sequence[Any], context: LoweringContext) -> Executable:
        """Generate the straight-line code, and make the outputs' strides what the neighbours were built for."""
        layouts, operators = prepare(module)
        if _invariant(context):
            from omnicomp.lowerings.batch_invariant import put_forms

            put_forms(module)
        return eager_executable(boxed(module), layouts, operators)


def _invariant(context: LoweringContext) -> bool:
    """Whether the rows of a part are to be independent of each other; gradients of weights are sums of all rows."""
    return context.policy.numerics == "batch-invariant" and context.part != "backward"


def prepare(module: GraphModule) -> tuple[list[Layout | None], list[str]]:
    """Make a post-autograd graph fit to run operator by operator.

    Returns:
        The layouts in which its results are expected, and the names of its operators.
    """
    output = next(iter(reversed(module.graph.nodes)))
    layouts = [layout_of(fake_value(value)) for value in output.args[0]]
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        # A kernel may return other strides than its fake kernel said, on which a view would then be impossible.
        # The graph is functional, so that a copy in its place is never written to.
        node.target = torch.ops.aten.reshape.default
    operators = sorted({op_name(node) for node in module.graph.nodes if node.op == "call_function"})
    for node in module.graph.find_nodes(op="call_function", target=FLEX_BACKWARD):
        node.target = backward_without_kernel
    return layouts, operators


def eager_executable(
    run: Callable[[list[Any]], Sequence[Any]], layouts: Sequence[Layout | None], operators: Sequence[str]
) -> Executable:
    """Wrap the function of a graph's inputs, so that its results have the layouts that `prepare` returned."""

    def restrided(arguments: list[Any]) -> Sequence[Any]:
        return list(map(restride, run(arguments), layouts))

    return Executable(
        lowering="eager",
        call=restrided if any(layout is not None for layout in layouts) else run,
        attest=lambda: ("torch.fx.GraphModule, operator by operator", dict.fromkeys(operators, 1)),
    )
