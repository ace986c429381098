"""Operators whose kernels are Triton's: eager launches them from Python, and Inductor's code launches them by itself.

To Inductor a custom operator is a call of Python in the middle of its code, which takes the host longer than a launch.
Here the operator has a lowering that makes of it what torch makes of a kernel that a program calls. The operator stays
one node up to there, so that the graph can be kept as text, run in eager and be compared.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor import ir
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.virtualized import V
from torch.library import Library
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils._triton import has_triton

from omnicomp._torch.autograd.overrides import put_fake

REFERENCES: Final[dict[Any, Callable[..., Any]]] = {}
"""What each operator computes, in plain torch."""

# Launches of compiled kernels by what they were compiled for, and how many are kept.
_compiled: Final[dict[Any, Callable[..., None]]] = {}
_MOST_COMPILED: Final = 256
_library: Final = Library("omnicomp", "FRAGMENT")


@dataclasses.dataclass(frozen=True, eq=False)
class Buffer:
    """Memory that kernels write to, and which is contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of a kernel."""

    kernel: Any  # made by `triton.jit`
    grid: tuple[int, ...]  # how many programs
    warps: int  # of a program
    stages: int = 3  # of the loads of a loop
    arguments: Mapping[str, Any]  # by name: tensors of the operator, buffers, numbers and constants


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What an operator does for tensors of these shapes and strides: launches in their order, and what they leave."""

    results: Sequence[Buffer]
    launches: Sequence[Launch]


def usable(tensor: torch.Tensor) -> bool:
    """Whether kernels of Triton can read a tensor as it is: a plain one, on an NVIDIA GPU that Triton compiles for."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and tensor.is_cuda and not tensor.is_neg() and torch.version.hip is None and has_triton()


def launch_cached(kernel: Any, programs: int, arguments: tuple[Any, ...]) -> None:
    """Launch a kernel on the current device, that of its tensors, without Triton's search for the compiled one.

    Args:
        kernel: made by `triton.jit`.
        programs: how many.
        arguments: all of them in order; tensors, numbers and constants.
    """
    # All that Triton may specialize a kernel for.
    known = [
        (value.dtype, value.device, value.data_ptr() % 16) if isinstance(value, torch.Tensor) else (type(value), value)
        for value in arguments
    ]
    key = kernel, programs, *known
    launch = _compiled.get(key)
    if launch is not None:
        launch(*arguments)
    elif (compiled := kernel[(programs,)](*arguments)) is not None:  # Triton's interpreter compiles none
        if len(_compiled) >= _MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = compiled[(programs, 1, 1)]


def define(schema: str, reference: Callable[..., Any], plan: Callable[..., Plan]) -> Any:
    """An operator of the namespace `omnicomp` that has no derivative.

    Args:
        schema: it returns a tensor, or a list of them.
        reference: what it computes, in plain torch; its kernel on the CPU, and on fake tensors.
        plan: of the same arguments, in which only shapes, strides, dtypes and the device are looked at.

    Returns:
        The operator's overload.
    """
    _library.define(schema)
    name = schema.partition("(")[0]
    operator = getattr(torch.ops.omnicomp, name).default
    single = isinstance(operator._schema.returns[0].type, torch.TensorType)
    REFERENCES[operator] = reference

    def on_cuda(*args: Any) -> Any:
        made = _launched(plan(*args), next(v for v in tree_leaves(args) if isinstance(v, torch.Tensor)).device)
        return made[0] if single else made

    def lowered(*args: Any) -> Any:
        made = _lowered(plan, args)
        return made[0] if single else made

    def described(*args: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda made: made.new_empty(made.shape), reference(*args))

    _library.impl(name, reference, "CPU")
    _library.impl(name, on_cuda, "CUDA")
    put_fake(_library, name, described)
    if operator not in lowerings:
        register_lowering(operator, type_promotion_kind=None)(lowered)
    return operator


def _launched(plan: Plan, device: torch.device) -> list[torch.Tensor]:
    made: dict[Buffer, torch.Tensor] = {}

    def real(value: Any) -> Any:
        if not isinstance(value, Buffer):
            return value
        if value not in made:
            made[value] = torch.empty(value.shape, dtype=value.dtype, device=device)
        return made[value]

    with torch.cuda.device(device if device.type == "cuda" else -1):  # Triton's interpreter takes the CPU's tensors
        for launch in plan.launches:
            arguments = {name: real(value) for name, value in launch.arguments.items()}
            _configured(launch.kernel, launch.warps, launch.stages)[launch.grid](**arguments)
    return [real(each) for each in plan.results]


def _lowered(plan: Callable[..., Plan], args: Sequence[Any]) -> list[Any]:
    """The launches as nodes of Inductor's."""
    fakes = torch.fx.map_arg(V.graph.current_node.args, lambda node: node.meta["val"])
    leaves, shape = tree_flatten(fakes)
    boxes: dict[int, Any] = {}
    for fake, box in zip(leaves, tree_leaves(list(args)), strict=True):
        if isinstance(fake, torch.Tensor):
            box.realize()  # once; what is not yet in memory would be computed again for each launch that reads it
            boxes[id(fake)] = ir.ExternKernel.require_exact_strides(box, fake.stride())
    made: dict[Buffer, Any] = {}
    empty: Any = lowerings[torch.ops.aten.empty_strided.default]
    device = next(fake for fake in leaves if isinstance(fake, torch.Tensor)).device

    def box_of(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return boxes[id(value)]
        if not isinstance(value, Buffer):
            return value
        if value not in made:
            made[value] = empty(list(value.shape), None, dtype=value.dtype, device=device)
        return made[value]

    found = plan(*tree_unflatten(leaves, shape))
    for launch in found.launches:
        kernel = _configured(launch.kernel, launch.warps, launch.stages)
        ir.UserDefinedTritonKernel(
            kernel_idx=kernel_side_table.add_kernel(kernel),
            grid=[(*launch.grid, *(1,) * (3 - len(launch.grid)))],
            tma_descriptor_metadata={},
            kernel_args={name: box_of(value) for name, value in launch.arguments.items()},
        )
    return [box_of(each) for each in found.results]


@functools.cache
def _configured(kernel: Any, warps: int, stages: int) -> Any:
    """The kernel with one configuration, which is how Inductor is told of it."""
    import triton  # pyright: ignore[reportMissingImports]

    return triton.autotune(configs=[triton.Config({}, num_warps=warps, num_stages=stages)], key=[])(kernel)
