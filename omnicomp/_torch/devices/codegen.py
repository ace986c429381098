"""Inductor's C++ kernels and Python wrappers for a device from outside, which torch's own classes refuse or get wrong.

Three things are different from the CPU's classes: the wrapper calls a kernel through the device's launch function (the
stock one refuses: "device gxu nyi"), allocations keep the index of the device (the stock one writes `device='gxu'` and
so allocates on the current one), and kernels are generated as for the CPU.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen
from torch._inductor.virtualized import V

from omnicomp._torch.repairs.local_buffers import row_of_its_own
from omnicomp._torch.repairs.scheduler_order import written_before_read


class DeviceCppScheduling(CppScheduling):
    """C++ kernels for a device whose memory they can address."""

    def codegen_node(self, node: Any) -> None:
        """Generate a kernel with the CPU as the current device.

        Of any device that it does not know, Inductor says that its kernels are Triton's, and then the C++ generator's
        type propagation asserts ("index.dtype is not None") in whatever has an index: arange, embedding, dropout.
        """
        with row_of_its_own(), V.graph.set_current_device(torch.device("cpu")):
            super().codegen_node(node)

    def can_fuse_horizontal(self, node1: Any, node2: Any) -> bool:
        """Torch's answer, with the order of writes and reads kept; also for graphs of plain Inductor."""
        with written_before_read():
            return bool(super().can_fuse_horizontal(node1, node2))

    def can_fuse_vertical(self, node1: Any, node2: Any) -> bool:
        """The same, for a node that reads what the other one writes."""
        with written_before_read():
            return bool(super().can_fuse_vertical(node1, node2))

    def fuse(self, node1: Any, node2: Any) -> Any:
        """Torch's fused node, with the order of writes and reads kept."""
        with written_before_read():
            return super().fuse(node1, node2)


class DeviceWrapper(PythonWrapperCodegen):
    """Host code in Python for graphs of a device; `python_wrapper` makes it one device's."""

    device_type: ClassVar[str]
    launch: ClassVar[str] = ""
    subgraph: ClassVar[type["DeviceWrapper"]]

    @classmethod
    def create(  # type: ignore[override]
        cls,
        is_subgraph: bool,
        subgraph_name: str | None,
        parent_wrapper: PythonWrapperCodegen | None,
        partition_signatures: Any = None,
    ) -> PythonWrapperCodegen:
        """What writes the code of a graph, or of a graph inside it: one of this class, unlike in torch's own."""
        if is_subgraph:
            make: Any = cls.subgraph
            return make(subgraph_name, parent_wrapper, partition_signatures)
        return cls()

    def make_allocation(self, name: str, device: torch.device, *args: Any, **kwargs: Any) -> str:
        """The line that allocates a buffer, on the device with the index that it was planned for."""
        line: str = super().make_allocation(name, device, *args, **kwargs)
        if device.type != self.device_type:
            return line
        return line.replace(f"device='{device.type}'", f"device='{device}'", 1)

    def _generate_kernel_call_helper(
        self, kernel_name: str, call_args: Any, *, device: Any = None, triton: bool = True, **kwargs: Any
    ) -> None:
        device = device or V.graph.get_current_device_or_throw()  # type: ignore[no-untyped-call]
        if triton or device.type != self.device_type:
            super()._generate_kernel_call_helper(  # type: ignore[misc]
                kernel_name, call_args, device=device, triton=triton, **kwargs
            )
            return
        arguments = [str(argument) for argument in call_args]
        name, given = (self.launch, [kernel_name, *arguments]) if self.launch else (kernel_name, arguments)
        self.writeline(self.wrap_kernel_call(name, given))  # type: ignore[attr-defined]


def python_wrapper(
    device_type: str, launch: str = "", base: type[DeviceWrapper] = DeviceWrapper
) -> type[DeviceWrapper]:
    """A wrapper class for a device.

    Args:
        device_type: its type.
        launch: what C++ kernels are called through in the generated module, for example `torch.gxu.launch`, which is
            called with the kernel and its arguments; empty to call the kernel itself. Triton's kernels launch
            themselves.
        base: a class with more of the device's own. It is the base for graphs inside a graph as well, such as the
            branches of `torch.cond`.
    """
    own = {"device_type": device_type, "launch": launch or base.launch, "__module__": __name__}
    subgraph = type(f"{device_type}SubgraphWrapper", (base, SubgraphPythonWrapperCodegen), dict(own))
    return type(f"{device_type}Wrapper", (base,), {**own, "subgraph": subgraph})


def no_cpp_wrapper(device_type: str, error: Callable[[], Exception]) -> type[PythonWrapperCodegen]:
    """A class in the place of a C++ wrapper that a device does not have: using it raises an error that says so.

    Without it Inductor asserts ("Device gxu not supported"), and AOTInductor takes the device for a CPU.
    """

    def create(*arguments: Any, **named: Any) -> Any:
        raise error()

    own = {"create": staticmethod(create), "absent": True, "__module__": __name__}
    return type(f"{device_type}NoCppWrapper", (PythonWrapperCodegen,), own)
