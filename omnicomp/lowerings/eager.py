"""The eager lowering: runs a subgraph operator by operator through torch's dispatcher. It is always asked last."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.fx import GraphModule, Node

from omnicomp._torch.fx import boxed
from omnicomp.graphs import fake_value, op_name, source_line
from omnicomp.lowerings.base import Executable, LoweringContext, Support
from omnicomp.timeline import Reason

__all__ = ["EagerLowering"]

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
        """
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
        output = next(iter(reversed(module.graph.nodes)))
        strides = [_static_strides(fake_value(value)) for value in output.args[0]]
        operators = sorted({op_name(node) for node in module.graph.nodes if node.op == "call_function"})
        run = boxed(module)

        def call(arguments: list[Any]) -> Sequence[Any]:
            return [_restride(value, stride) for value, stride in zip(run(arguments), strides, strict=True)]

        return Executable(
            lowering="eager",
            call=call if any(stride is not None for stride in strides) else run,
            attest=lambda: ("torch.fx.GraphModule, operator by operator", dict.fromkeys(operators, 1)),
        )


def _static_strides(value: Any) -> tuple[int, ...] | None:
    """Strides that a consumer may rely on; None for what is no tensor or has symbolic strides."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    stride: tuple[Any, ...] = value.stride()
    return stride if all(type(step) is int for step in stride) else None


def _restride(value: Any, stride: tuple[int, ...] | None) -> Any:
    """Copy a result whose layout is not the predicted one: Inductor's code reads memory by the predicted strides."""
    if stride is None or not isinstance(value, torch.Tensor) or value.stride() == stride or value.numel() == 0:
        return value
    result = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
    return result.copy_(value)


Boxed = Callable[[list[Any]], Sequence[Any]]
