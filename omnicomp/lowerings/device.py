"""The lowering to a device's own compiler, which `Device.compile_subgraph` calls."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch.fx import GraphModule, Node

from omnicomp.analysis.nodes import op_name, source_line
from omnicomp.devices import Device
from omnicomp.lowerings.base import Executable, LoweringContext, Support
from omnicomp.lowerings.eager import EagerLowering, eager_executable, prepare
from omnicomp.lowerings.override import override_of
from omnicomp.timeline import Reason

_OURS: Final = ("omnicomp", "omnicomp_override")


class DeviceLowering:
    """Calls `Device.compile_subgraph`; if it raises, the error is the reason why the next lowering is asked."""

    name = "device"

    def supports(self, node: Node, context: LoweringContext) -> Support:
        """Every operator of torch's or the program's; the device's compiler decides when it builds."""
        reason = EagerLowering().supports(node, context)
        if reason is not None:
            return dataclasses.replace(reason, by=self.name)
        if getattr(node.target, "namespace", "") not in _OURS and override_of(node) is None:
            return None
        return Reason(
            code="unsupported_op",
            by=self.name,
            sentence="it is an operator of omnicomp, and the compiler of a device is given those of torch",
            node=f"{node.name} ({op_name(node)})",
            source=source_line(node),
        )

    def lower(self, module: GraphModule, inputs: Sequence[Any], context: LoweringContext) -> Executable:
        """Compile, and make the results' strides what the neighbours were built for."""
        layouts, operators = prepare(module)
        call = context.device.compile_subgraph(module, inputs)
        evidence = f"{context.device.type}: {_compiler(context.device)} gave {_name(call)}"
        built = eager_executable(call, layouts, operators)
        return dataclasses.replace(built, lowering=self.name, attest=lambda: (evidence, {}))


def _compiler(device: Device) -> str:
    return device.capabilities().compiler or f"{type(device).__qualname__}.compile_subgraph"


def _name(call: Callable[..., Any]) -> str:
    kind = call if hasattr(call, "__qualname__") else type(call)
    return f"{kind.__module__}.{kind.__qualname__}"
