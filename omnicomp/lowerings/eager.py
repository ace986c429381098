"""The eager lowering: runs a subgraph operator by operator through torch's dispatcher. It is always asked last."""

from collections.abc import Sequence
from typing import Any, Final, Literal

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
        layouts: list[Layout] = [_layout(fake_value(value)) for value in output.args[0]]
        operators = sorted({op_name(node) for node in module.graph.nodes if node.op == "call_function"})
        run = boxed(module)

        def call(arguments: list[Any]) -> Sequence[Any]:
            return [_restride(value, layout) for value, layout in zip(run(arguments), layouts, strict=True)]

        return Executable(
            lowering="eager",
            call=call if any(layout is not None for layout in layouts) else run,
            attest=lambda: ("torch.fx.GraphModule, operator by operator", dict.fromkeys(operators, 1)),
        )


_CONTIGUOUS: Final = "contiguous"
Layout = tuple[int, ...] | Literal["contiguous"] | None
"""Strides that a consumer may rely on: numbers, contiguous ones of symbolic sizes, or None where nothing is known."""


def _layout(value: Any) -> Layout:
    """The layout that the neighbours of the subgraph were built for."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    stride: tuple[Any, ...] = value.stride()
    if all(type(step) is int for step in stride):
        return stride
    return _CONTIGUOUS if _symbolically_contiguous(value) else None


def _symbolically_contiguous(value: torch.Tensor) -> bool:
    """Whether each stride is, as an expression, the product of the sizes behind it; asks nothing that adds a guard."""
    expected: Any = 1
    for size, step in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if _expression(step) != _expression(expected):
            return False
        expected = expected * size
    return True


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _restride(value: Any, layout: Layout) -> Any:
    """Copy a result whose layout is not the predicted one: Inductor's code reads memory by the predicted strides."""
    if layout is None or not isinstance(value, torch.Tensor) or value.numel() == 0:
        return value
    if layout == _CONTIGUOUS:
        return value.contiguous()
    if value.stride() == layout:
        return value
    result = torch.empty_strided(value.shape, layout, dtype=value.dtype, device=value.device)
    return result.copy_(value)
